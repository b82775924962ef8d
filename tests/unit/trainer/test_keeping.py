"""Which evaluation counts as best, which checkpoints are kept, and when a run stops early."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_directories import saved_steps

Make = Callable[..., Any]

SAVE = {"checkpoint.every": "1 steps"}


def best(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "checkpoints" / "best.json").read_text())
    return found


@pytest.mark.parametrize(
    ("script", "keep", "expected", "best_step"),
    [
        ([10, 20, 30, 40, 50], 2, [4, 5], 5),
        ([10, 50, 30, 40, 20], 2, [2, 4, 5], 2),
        ([50, 10, 30, 40, 20], 1, [1, 5], 1),
        ([50, 50, 50, 50, 50], 2, [1, 4, 5], 1),
        ([50, 10, 60, 40, 20], 1, [3, 5], 3),
        ([10, 20, 30, 40, 50], 9, [1, 2, 3, 4, 5], 5),
    ],
)
def test_the_newest_and_the_best_are_kept(
    script: list[float], keep: int, expected: list[int], best_step: int, scripted: Make
) -> None:
    result = scripted("run", script, {**SAVE, "checkpoint.keep": keep})
    assert saved_steps(result.run_dir) == expected
    found = best(result.run_dir)
    assert (found["step"], found["metric"], found["weights"]) == (best_step, "top1_accuracy", "model")
    assert found["value"] == pytest.approx(script[best_step - 1])
    assert result.metrics["best"]["step"] == best_step
    assert result.metrics["top1_accuracy"] == pytest.approx(script[-1])


def test_the_best_need_not_be_kept(scripted: Make) -> None:
    result = scripted("run", [50, 10, 10, 10], {**SAVE, "checkpoint.keep_best": False})
    assert saved_steps(result.run_dir) == [3, 4]
    assert not (result.run_dir / "checkpoints" / "best.json").exists()


def test_the_best_is_saved_between_checkpoints(scripted: Make) -> None:
    result = scripted("run", [10, 20, 60, 40, 50, 30], {"checkpoint.every": "off"})
    assert saved_steps(result.run_dir) == [3, 6]


def test_a_smaller_loss_is_better(scripted: Make) -> None:
    result = scripted("run", [3.0, 1.0, 2.0], {**SAVE, "evaluate.metric": "loss"}, metric="loss")
    assert (best(result.run_dir)["step"], best(result.run_dir)["value"]) == (2, 1.0)


@pytest.mark.parametrize(
    ("script", "best_step"), [([math.nan, 2.0, 1.0], 3), ([1.0, math.nan, 2.0], 1), ([2.0, math.nan, 1.0], 3)]
)
def test_what_is_no_number_is_never_best(script: list[float], best_step: int, scripted: Make) -> None:
    result = scripted("run", script, {**SAVE, "evaluate.metric": "loss"}, metric="loss")
    assert best(result.run_dir)["step"] == best_step


def test_the_best_is_found_over_both_sets_of_weights(scripted: Make) -> None:
    """At step 4 the average still lags at step 3, which no evaluation of the model itself has seen."""
    overrides = {**SAVE, "train.ema": 0.5, "evaluate.every": "2 steps"}
    result = scripted("run", [10, 10, 90, 20, 10, 30], overrides)
    found = best(result.run_dir)
    assert (found["step"], found["weights"]) == (4, "ema")
    assert found["value"] == pytest.approx(90)
    assert result.metrics["weights"] == "ema"
    assert result.metrics["last"]["model"]["top1_accuracy"] == pytest.approx(30)
    assert result.metrics["last"]["ema"]["top1_accuracy"] == pytest.approx(10)
    assert saved_steps(result.run_dir) == [4, 5, 6]


def test_the_best_survives_a_resume(scripted: Make) -> None:
    scripted("run", [10, 70, 20], SAVE)
    result = scripted("run", [10, 70, 20, 30, 40], SAVE)
    assert result.summary.resumes == 1
    assert best(result.run_dir)["step"] == 2
    assert saved_steps(result.run_dir) == [2, 4, 5]


def test_going_back_before_the_best_forgets_it(scripted: Make, runs: Path) -> None:
    overrides = {**SAVE, "checkpoint.keep": 9, "evaluate.every": "2 steps"}
    scripted("run", [10, 70, 20, 90], overrides)
    assert best(runs / "run")["step"] == 4
    checkpoints = runs / "run" / "checkpoints"
    result = scripted("run", [10, 30, 20, 25], overrides, resume=str(checkpoints / "step-00000001"))
    assert best(result.run_dir)["step"] == 2
    assert best(result.run_dir)["value"] == pytest.approx(30)
    assert saved_steps(result.run_dir) == [1, 2, 3, 4]


def test_a_best_step_without_a_checkpoint_is_not_named(scripted: Make, runs: Path) -> None:
    """The best step before the checkpoint that a run goes back to was deleted, and what was best later is no more."""
    overrides = {**SAVE, "checkpoint.keep": 2}
    result = scripted("run", [50, 10, 60], overrides)
    assert best(result.run_dir)["step"] == 3
    assert saved_steps(result.run_dir) == [2, 3]
    checkpoints = runs / "run" / "checkpoints"
    scripted("run", [50, 10, 20], overrides, resume=str(checkpoints / "step-00000002"))
    assert not (checkpoints / "best.json").exists()


def test_a_best_step_is_not_named_where_it_is_not_kept(scripted: Make, runs: Path) -> None:
    overrides = {**SAVE, "checkpoint.keep": 1}
    scripted("run", [50, 10], overrides)
    assert saved_steps(runs / "run") == [1, 2]
    scripted("run", [50, 10, 20], {**overrides, "checkpoint.keep_best": False})
    assert saved_steps(runs / "run") == [3]
    assert not (runs / "run" / "checkpoints" / "best.json").exists()


def test_another_metric_begins_its_own_best(scripted: Make) -> None:
    scripted("run", [1.0, 0.5], SAVE)
    values = {**SAVE, "evaluate.metric": "loss"}
    result = scripted("run", [1.0, 0.5, 6.9, 6.8], values, metric="loss")
    assert (best(result.run_dir)["metric"], best(result.run_dir)["step"]) == ("loss", 4)


# -------------------------------------------------------------------------------------- early stopping


@pytest.mark.parametrize(
    ("script", "patience", "last"),
    [
        ([10, 20, 15, 20, 10, 30, 40], 3, 5),
        ([10, 20, 15, 21, 10, 30, 40], 3, 7),
        ([10, 10, 10], 1, 2),
        ([50, 40, 30, 20], 9, 4),
        ([50, 40, 30, 20], 3, 4),
    ],
)
def test_patience(script: list[float], patience: int, last: int, scripted: Make) -> None:
    result = scripted("run", script, {"evaluate.patience": patience, "checkpoint.every": "off"})
    assert (result.status, result.summary.step) == ("completed", last)
    assert last in saved_steps(result.run_dir)


def test_what_happened_before_patience_ended_is_recorded(scripted: Make) -> None:
    result = scripted("run", [20, 10, 10, 50, 60], {"evaluate.patience": 2, "telemetry.log_every": "2 steps"})
    events = (result.run_dir / "events.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in events if '"event": "step"' in line]
    assert [record["step"] for record in records] == [2, 3]


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_patience_counts_across_resumes(stop: int, scripted: Make) -> None:
    script = [10, 20, 15, 20, 10, 30, 40]
    scripted("run", script[:stop], SAVE)
    assert scripted("run", script, {**SAVE, "evaluate.patience": 3}).summary.step == 5


def test_a_run_that_stopped_early_is_complete_until_it_has_more_patience(scripted: Make) -> None:
    script = [20, 10, 10, 50, 60]
    assert scripted("run", script, {"evaluate.patience": 2}).summary.step == 3
    again = scripted("run", script, {"evaluate.patience": 2})
    assert again.was_complete
    assert again.summary.step == 3
    assert scripted("run", script, {"evaluate.patience": 3}).summary.step == 5
