"""Counts behind the rules of thumb in docs/measured.md still equal their result file."""

from __future__ import annotations

import json
from pathlib import Path

import counted
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

(RESULT,) = (BENCHMARKS / "results").glob("counted_*.json")
FIGURES = json.loads(RESULT.read_text(encoding="utf-8"))["figures"]


@pytest.mark.parametrize("name", sorted(counted.COUNTS.keys() | FIGURES.keys()))
def test_a_count_equals_its_result_file(name: str) -> None:
    assert counted.COUNTS[name]() == pytest.approx(FIGURES[name], rel=1e-3, abs=1e-9)
