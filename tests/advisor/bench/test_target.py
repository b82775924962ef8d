"""Are targets read, met and counted as they should be?"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from paceline.errors import RecipeError
from paceline.recipe.load import load_recipe
from paceline_advisor.bench.target import MetricTarget, TargetRun, follow, summarise_runs


def test_targets_are_read() -> None:
    assert MetricTarget.parse("top1_accuracy=94") == MetricTarget("top1_accuracy", 94.0)
    assert MetricTarget.parse(" loss=1e-2 ") == MetricTarget("loss", 0.01)
    for wrong in ("94", "top1_accuracy", "top1_accuracy=", "=94", "top1_accuracy=high", "top1_accuracy=1e", "a=1=2"):
        with pytest.raises(RecipeError, match="METRIC=VALUE"):
            MetricTarget.parse(wrong)


def test_more_is_better_but_for_losses() -> None:
    accuracy, loss = MetricTarget("top1_accuracy", 94.0), MetricTarget("loss", 0.5, less_is_better=True)
    assert [accuracy.is_met(value) for value in (93.99, 94.0, 95.0)] == [False, True, True]
    assert [loss.is_met(value) for value in (0.51, 0.5, 0.1)] == [False, True, True]
    assert not accuracy.is_met(math.nan)


def test_the_task_says_which_metrics_there_are_and_which_way_they_go() -> None:
    recipe = load_recipe("digits").recipe
    assert not MetricTarget("top1_accuracy", 94.0).of(recipe).less_is_better
    assert not MetricTarget("top5_accuracy", 94.0).of(recipe).less_is_better
    assert MetricTarget("loss", 0.5).of(recipe).less_is_better
    # As evaluate.metric knows them, of the same data: of ten classes five make sense, and seven were not asked for.
    for name in ("accuracy", "top7_accuracy"):
        message = (
            rf"--to {name}=94: {name} is not a metric of this task; choose one of: loss, top1_accuracy, "
            rf"top5_accuracy\."
        )
        with pytest.raises(RecipeError, match=message):
            MetricTarget(name, 94.0).of(recipe)


def test_a_percentage_that_cannot_be_is_refused() -> None:
    recipe = load_recipe("digits").recipe
    assert MetricTarget.parse("top1_accuracy=100").of(recipe).value == 100
    with pytest.raises(RecipeError, match=r"top1_accuracy is in percent; give 0 to 100\."):
        MetricTarget.parse("top1_accuracy=200").of(recipe)


def test_a_metric_that_came_to_no_number_is_not_there_yet(tmp_path: Path) -> None:
    """A loss that is not finite is recorded as none."""
    events = [{"event": "start", "step": 0, "time": 10.0}] + [
        {"event": "evaluation", "step": step, "epoch": step, "time": 10.0 + step, "train_seconds": float(step)}
        | {"weights": which, "loss": loss, "top1_accuracy": 10.0 * step}
        for step, pair in enumerate(((None, None), (None, 0.7), (0.8, None), (0.4, None)), start=1)
        for which, loss in zip(("raw", "ema"), pair, strict=True)
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    target = MetricTarget("loss", 0.5, less_is_better=True)
    found = TargetRun(seed=0)
    follow(found, tmp_path, target)
    assert found.reached
    assert [each["loss"] for each in found.evaluations] == [None, 0.7, 0.8, 0.4]
    assert not target.is_met(None)


TARGET = MetricTarget("top1_accuracy", 94.0)


def run(seconds: float, *, reached: bool, trouble: str = "") -> TargetRun:
    return TargetRun(seed=0, reached=reached, train_seconds=seconds, wall_seconds=2 * seconds, trouble=trouble)


def test_who_did_not_get_there_counts_as_long_as_it_ran() -> None:
    runs = [run(seconds, reached=seconds < 50) for seconds in (10.0, 11.0, 12.0, 60.0, 60.0)]
    row = summarise_runs(runs, TARGET, 36.0)
    assert (row["reached"], row["median_seconds"]["middle"]) == (3, 12.0)
    assert row["median_wall_seconds"]["middle"] == 24.0
    # What is paid is the wall's: 24 seconds at 36 an hour.
    assert row["cost"]["middle"] == pytest.approx(0.24)
    assert row["seconds_with_restarts"] == pytest.approx(153 / 3)
    assert row["times"] == []
    assert row["mean_seconds"] is None
    assert "2 of 5" in row["trouble"]


def test_a_run_that_failed_is_censored_where_it_failed() -> None:
    failed = run(5, reached=False, trouble="it broke")
    row = summarise_runs([run(10, reached=True), failed, run(20, reached=True)], TARGET)
    assert row["trouble"] == "it broke"
    assert row["median_seconds"]["middle"] == 10.0
    assert row["cost"] is None


def test_a_run_that_failed_at_once_is_no_reason_to_praise_the_others() -> None:
    runs = [run(10, reached=True), run(12, reached=True), *[run(0, reached=False, trouble="it broke")] * 2]
    row = summarise_runs(runs, TARGET)
    assert (row["reached"], row["reached_share"]["middle"], row["mean_seconds"]) == (2, 0.5, None)
    assert row["seconds_with_restarts"] > 12


def test_runs_that_all_got_there_can_be_compared() -> None:
    row = summarise_runs([run(10, reached=True), run(12, reached=True)], TARGET)
    assert (row["times"], row["trouble"], row["mean_seconds"]) == ([[10, 12]], None, 11)
