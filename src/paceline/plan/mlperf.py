"""Whether a run's log in MLPerf's format can be written, and by the rules that it names.

Rules are those of MLPerf Training 4.0, the last that have ResNet-50, as far as the published checker of logs looks at
them (mlcommons/logging, compliance_checker/training_4.0.0 and training_3.1.0).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from paceline.errors import RecipeError
from paceline.recipe.schema import Recipe

NOT_A_RESULT = "a log in MLPerf's format, not an MLPerf result"
CLOSED_TARGET = 75.9
"""Percent of top-1 accuracy at which a run of the closed division has arrived."""
_TASKS = ("image_classification", "distillation")
_MUST_BE_STATED = ("org", "platform", "division", "status")


def check_mlperf(recipe: Recipe, *, evaluation_samples: int, peak_lr: float) -> dict[str, str]:
    """Find out before a run, or before its log is written, whether there can be one.

    Args:
        recipe: The recipe.
        evaluation_samples: How many are held out.
        peak_lr: The learning rate after its scaling rule.

    Returns:
        What is to be told of it, by dotted key.

    Raises:
        RecipeError: Naming what is missing, or the first thing that the closed division does not allow.
    """
    if not recipe.telemetry.mlperf:
        return {}
    said = recipe.telemetry.submission
    if missing := [name for name in _MUST_BE_STATED if not getattr(said, name)]:
        raise RecipeError(
            "telemetry.mlperf=true writes a log that says who ran on what and by which rules, and nothing is said of "
            f"{', '.join(f'telemetry.submission.{name}' for name in missing)}; state them, or leave telemetry.mlperf "
            "out."
        )
    if recipe.task not in _TASKS:
        raise RecipeError(
            f"telemetry.mlperf=true writes the log of MLPerf's resnet, which is image classification, and this is "
            f"task={recipe.task}; leave it out."
        )
    if recipe.evaluate.every is None or evaluation_samples == 0:
        raise RecipeError(
            "telemetry.mlperf=true writes when the target was reached, and nothing is evaluated; set evaluate.every, "
            "and hold samples out."
        )
    if said.division == "closed" and (objection := next(_objections(recipe, peak_lr), "")):
        raise RecipeError(
            f"telemetry.submission.division=closed: MLPerf Training 4.0 asks of resnet {objection}; change it, or say "
            "division=open."
        )
    return {"telemetry.mlperf": NOT_A_RESULT}


def _objections(recipe: Recipe, peak_lr: float) -> Iterator[str]:
    """What stands against the closed division: what it asks for, and what was found."""
    if recipe.task != "image_classification":
        yield f"the reference's loss, found task={recipe.task}"
    yield from _objections_to_rates(recipe, peak_lr)
    if recipe.telemetry.submission.target_accuracy < CLOSED_TARGET:
        found = recipe.telemetry.submission.target_accuracy
        yield f"telemetry.submission.target_accuracy of at least {CLOSED_TARGET}, found {found:g}"
    if recipe.train.ema is not None:
        yield f"the network's own weights to be evaluated, found train.ema={recipe.train.ema:g}"
    if recipe.batch.growth:
        yield "one global batch size, found batch.growth"


def _objections_to_rates(recipe: Recipe, peak_lr: float) -> Iterator[str]:
    optimizer, schedule, name = recipe.optimizer, recipe.schedule, recipe.optimizer.name
    if name not in ("sgd", "lars"):
        yield f"optimizer.name=sgd or lars, found {name}"
    if schedule.name != "polynomial":
        yield f"schedule.name=polynomial, found {schedule.name}"
    if schedule.end_lr != 0.0001:
        yield f"schedule.end_lr=0.0001, found {schedule.end_lr:g}"
    if name == "lars" and schedule.power != 2:
        yield f"schedule.power=2 with lars, found {schedule.power:g}"
    if name == "lars" and optimizer.denominator_eps != 0:
        yield f"optimizer.eps=0 with lars, found {optimizer.denominator_eps:g}"
    if name == "sgd" and not _is_whole(peak_lr / 0.001):
        yield f"a multiple of 0.001 as learning rate with sgd, found {peak_lr:g} (optimizer.lr)"
    if optimizer.weight_decay == 0 or not _is_whole(math.log2(optimizer.weight_decay / 0.0001)):
        yield f"optimizer.weight_decay of 0.0001 times a power of two, found {optimizer.weight_decay:g}"


def _is_whole(value: float) -> bool:
    """As the published checker sees it."""
    return abs(round(value) - value) < 0.00001
