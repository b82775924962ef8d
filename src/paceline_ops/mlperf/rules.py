"""Check whether a run's log in MLPerf's format can be written, under the rules that it names.

The rules are those of MLPerf Training 4.0, the last version with ResNet-50, as far as the published log checker
verifies them (mlcommons/logging, compliance_checker/training_4.0.0 and training_3.1.0).
"""

from __future__ import annotations

import math

from paceline.errors import RecipeError
from paceline.recipe.schema import Recipe

NOT_A_RESULT = "a log in MLPerf's format, not an MLPerf result"
CLOSED_TARGET = 75.9
"""Percent of top-1 accuracy at which a run of the closed division has arrived."""
_TASKS = ("image_classification", "distillation")
_MUST_BE_STATED = ("org", "platform", "division", "status")


def check_mlperf(recipe: Recipe, *, evaluation_samples: int, peak_lr: float) -> dict[str, str]:
    """Check, before a run or before writing its log, that the log is possible.

    Args:
        recipe: The recipe.
        evaluation_samples: Number of held-out samples.
        peak_lr: The learning rate after its scaling rule.

    Returns:
        Its notices, by dotted key.

    Raises:
        RecipeError: Naming what is missing, or the first thing that the closed division does not allow.
    """
    submission = recipe.telemetry.submission
    if missing := [name for name in _MUST_BE_STATED if not getattr(submission, name)]:
        raise RecipeError(
            "telemetry.mlperf=true writes a log that states who ran on what and under which rules, but these are not "
            f"set: {', '.join(f'telemetry.submission.{name}' for name in missing)}; set them, or leave "
            "telemetry.mlperf out."
        )
    if recipe.task not in _TASKS:
        raise RecipeError(
            f"telemetry.mlperf=true writes the log of MLPerf's resnet, which is image classification, and this is "
            f"task={recipe.task}; leave it out."
        )
    if recipe.evaluate.every is None or evaluation_samples == 0:
        raise RecipeError(
            "telemetry.mlperf=true logs when the target was reached, but nothing is evaluated; set evaluate.every, and "
            "hold samples out."
        )
    objection = next((each for each, violated in _objections(recipe, peak_lr).items() if violated), "")
    if submission.division == "closed" and objection:
        raise RecipeError(
            f"telemetry.submission.division=closed: MLPerf Training 4.0 requires for resnet {objection}; change it, or "
            "set division=open."
        )
    return {"telemetry.mlperf": NOT_A_RESULT}


def _objections(recipe: Recipe, peak_lr: float) -> dict[str, object]:
    """Return each rule of the closed division, what was found, and whether it is violated."""
    optimizer, schedule, name, ema = recipe.optimizer, recipe.schedule, recipe.optimizer.name, recipe.train.ema
    decay, accuracy = optimizer.weight_decay, recipe.telemetry.submission.target_accuracy
    is_power = decay > 0 and _is_integer(math.log2(decay / 0.0001))
    return {
        f"the reference's loss, found task={recipe.task}": recipe.task != "image_classification",
        f"optimizer.name=sgd or lars, found {name}": name not in ("sgd", "lars"),
        f"schedule.name=polynomial, found {schedule.name}": schedule.name != "polynomial",
        f"schedule.end_lr=0.0001, found {schedule.end_lr:g}": schedule.end_lr != 0.0001,
        f"schedule.power=2 with lars, found {schedule.power:g}": name == "lars" and schedule.power != 2,
        f"optimizer.eps=0 with lars, found {optimizer.denominator_eps:g}": (
            name == "lars" and optimizer.denominator_eps != 0
        ),
        f"a multiple of 0.001 as learning rate with sgd, found {peak_lr:g} (optimizer.lr)": (
            name == "sgd" and not _is_integer(peak_lr / 0.001)
        ),
        f"optimizer.weight_decay of 0.0001 times a power of two, found {decay:g}": not is_power,
        f"telemetry.submission.target_accuracy of at least {CLOSED_TARGET}, found {accuracy:g}": (
            accuracy < CLOSED_TARGET
        ),
        f"the network's own weights to be evaluated, found train.ema={ema}": ema is not None,
        "one global batch size, found batch.growth": recipe.batch.growth,
    }


def _is_integer(value: float) -> bool:
    """Whether a value is a whole number, as the published checker decides it."""
    return abs(round(value) - value) < 0.00001
