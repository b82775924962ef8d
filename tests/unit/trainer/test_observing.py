"""Observed steps: they change nothing, and are few."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.learning.observer import has_loss_observed, is_observed
from paceline.trainer import build

Make = Callable[..., Any]


def test_observing_changes_no_weight(train_tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with_it = train_tiny("with")
    monkeypatch.setattr(build, "_listeners", lambda *_: [])
    without = train_tiny("without")
    assert with_it.summary.weights_sha256 == without.summary.weights_sha256
    assert observed(with_it.run_dir)
    assert not [each for each in observed(without.run_dir) if each["split"] == "train"]


def observed(run_dir: Path) -> list[dict[str, Any]]:
    events = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return [each for each in events if each["event"] == "observation"]


def test_few_steps_are_observed() -> None:
    total = 10_000
    assert [step + 1 for step in range(total) if is_observed(step, total)] == [*(4**n for n in range(7)), total]
    assert sum(has_loss_observed(step, total) for step in range(total)) == 8 + 7


def test_an_observed_step_has_its_gradients_and_updates(train_tiny: Make) -> None:
    first = next(each for each in observed(train_tiny("run").run_dir) if each["split"] == "train")
    assert first["step"] == 1
    assert any(each["gradient"] > 0 for each in first["blocks"].values()), first["blocks"]
    assert any(each["update"] > 0 for each in first["blocks"].values()), first["blocks"]
    assert first["calls"] == 1
    assert first["trained"] == first["parameters"]
