"""The programs of `examples/conform`, with the trainers that are installed here."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline_advisor.commands import Conform
from paceline_advisor.conform.study import conform

PROGRAMS = Path(__file__).parents[3] / "examples" / "conform"

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("name", ["batch_order.py", "own_loop.py"])
def test_nothing_is_found_in_programs_with_parts_of_paceline(name: str) -> None:
    verdicts = {check.name: check.verdict for check in conform(Conform(program=PROGRAMS / name), lambda _: None).checks}
    assert "failed" not in verdicts.values()
    assert verdicts["samples_after_resume"] == verdicts["weights_after_resume"] == "passed"


@pytest.mark.parametrize("name", ["accelerate_loop.py", "lightning_trainer.py"])
def test_samples_that_a_trainer_repeats_and_misses_are_counted(name: str) -> None:
    pytest.importorskip(name.partition("_")[0])
    report = conform(Conform(program=PROGRAMS / name), lambda _: None)
    (check,) = (check for check in report.checks if check.name == "samples_after_resume")
    assert check.verdict == "failed"
    assert check.repeated
    assert check.repeated == check.missing
