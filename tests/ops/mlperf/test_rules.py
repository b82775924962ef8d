"""What a log in MLPerf's format cannot do without is asked for before the run."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import RecipeError
from paceline.plan.run_logs import check_logs
from paceline.recipe.load import load_recipe
from paceline_ops.mlperf.rules import check_mlperf

SUBMISSION = {"org": "Us", "platform": "here", "division": "closed", "status": "research"}
CLOSED = {
    "telemetry": {"mlperf": True, "submission": SUBMISSION},
    "optimizer": {"name": "sgd", "lr": 0.1, "weight_decay": 0.00005},
    "schedule": {"name": "polynomial", "end_lr": 0.0001},
    "train.ema": "off",
}
LARS = {"optimizer.name": "lars", "optimizer.eps": 0.0}


def check(changes: dict[str, Any], *, evaluation_samples: int = 10) -> dict[str, str]:
    recipe = load_recipe("digits", {**CLOSED, **changes}).recipe
    return check_mlperf(recipe, evaluation_samples=evaluation_samples, peak_lr=recipe.optimizer.lr)


@pytest.mark.parametrize("changes", [{}, LARS, {"optimizer.lr": 17.0}, {"telemetry.submission.target_accuracy": 80.0}])
def test_what_the_closed_division_allows(changes: dict[str, Any]) -> None:
    assert check(changes) == {"telemetry.mlperf": "a log in MLPerf's format, not an MLPerf result"}


def test_nothing_is_asked_where_no_log_is() -> None:
    recipe = load_recipe("digits", {"evaluate.every": "off"}).recipe
    assert check_logs(recipe, 10, 0.1) == {}


@pytest.mark.parametrize("key", ["org", "platform", "division", "status"])
def test_who_and_where_must_be_stated(key: str) -> None:
    with pytest.raises(RecipeError, match=rf"these are not set: telemetry\.submission\.{key}; set them"):
        check({f"telemetry.submission.{key}": None})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer.name": "adamw"}, "optimizer.name=sgd or lars, found adamw"),
        ({"schedule.name": "cosine"}, "schedule.name=polynomial, found cosine"),
        ({"schedule.end_lr": 0.0}, "schedule.end_lr=0.0001, found 0"),
        ({**LARS, "schedule.power": 1.0}, "schedule.power=2 with lars, found 1"),
        ({"optimizer.name": "lars"}, "optimizer.eps=0 with lars, found 1e-08"),
        ({"optimizer.lr": 0.1005}, "a multiple of 0.001 as learning rate with sgd, found 0.1005"),
        ({"optimizer.weight_decay": 0.0003}, "0.0001 times a power of two, found 0.0003"),
        ({"optimizer.weight_decay": 0.0}, "0.0001 times a power of two, found 0"),
        ({"telemetry.submission.target_accuracy": 70.0}, "at least 75.9, found 70"),
        ({"train.ema": 0.99}, "found train.ema=0.99"),
        ({"batch.growth": {2: 256}}, "one global batch size, found batch.growth"),
        ({"task": "distillation", "distillation.teacher": "x"}, "found task=distillation"),
    ],
)
def test_what_it_does_not_is_refused_and_the_open_division_takes_it(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=r"division=closed: MLPerf Training 4\.0 requires for resnet") as refused:
        check(changes)
    assert message in str(refused.value)
    check({**changes, "telemetry.submission.division": "open"})


def test_a_log_needs_images_and_evaluations() -> None:
    with pytest.raises(RecipeError, match="nothing is evaluated"):
        check({"evaluate.every": "off"})
    with pytest.raises(RecipeError, match="nothing is evaluated"):
        check({}, evaluation_samples=0)
    with pytest.raises(RecipeError, match="task=detection"):
        check({"task": "detection"})


def test_only_lars_does_without_eps() -> None:
    with pytest.raises(RecipeError, match="found eps=0, but only lars"):
        load_recipe("digits", {"optimizer.name": "adamw", "optimizer.eps": 0.0})
