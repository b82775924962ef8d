"""Check what a task's methods return: a mistake in your own code is one sentence, before the first step."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.errors import ModelError, PacelineError, did_you_mean
from paceline.metrics.accumulator import Metric
from paceline.tasks.task import Task


def refused(task: Task, found: str, value: Any, expected: str) -> ModelError:
    """Return the error for a task's method that returned the wrong thing, such as ``found="loss returned"``."""
    shown = f"a value of type {type(value).__name__}"
    if isinstance(value, Tensor):
        shown = f"a tensor of shape {list(value.shape)} and {value.dtype}"
    return ModelError(f"{type(task).__name__}.{found} {shown}, but it must be {expected}.")


def refuse_missing(task: Task, found: str, names: Iterable[str], needed: str, name: str) -> None:
    """Refuse a name that is not among ``names``, such as a misspelt key of the scores.

    Raises:
        ModelError: If it is missing; ``found`` and ``needed`` say what the names and the name are.
    """
    if name not in (names := [*map(str, names)]):
        listed = ", ".join(map(repr, names)) or "empty"
        hint = did_you_mean(name, names)
        raise ModelError(f"{type(task).__name__}.{found} {listed}, but {needed} {name!r}; correct one.{hint}")


def checked_loss(task: Task, loss: Any, *, needs_gradient: bool) -> Tensor:
    """Return a loss, the mean over a micro-batch.

    Raises:
        ModelError: If it is not one floating-point number in a tensor, or has no gradient.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise refused(task, "loss returned", loss, "the micro-batch's mean loss, a tensor of one floating-point number")
    if needs_gradient and not loss.requires_grad:
        raise refused(task, "loss returned", loss, "one with a gradient, computed from the model's answer")
    return loss


def check_scores(task: Task, scores: Any, samples: int) -> None:
    """Check a batch's scores.

    Raises:
        ModelError: If a metric finds no tensor with one row per sample.
    """
    if not isinstance(scores, Mapping):
        raise refused(task, "score returned", scores, "a dict with a tensor of one number per sample for each metric")
    means = [metric for metric in task.metrics if not metric.is_collected]
    divided = {metric.summed for metric in means if metric.per}
    for key in filter(None, (each for metric in means for each in (metric.summed, metric.per))):
        refuse_missing(task, "score returned", scores, "the metrics need", key)
        value = scores[key]
        is_right = isinstance(value, Tensor) and value.ndim and len(value) == samples
        if not is_right or (task.is_own and key not in divided and value.numel() != samples):
            raise refused(task, f"score[{key!r}] is", value, f"a tensor of {samples} numbers here, one per sample")


def check_metrics(task: Task) -> None:
    """Check the type of the metrics, and the headline of your own class.

    Raises:
        ModelError: If they are not a tuple of metrics, or the headline is not among them.
    """
    if not isinstance(task.metrics, tuple | list) or not all(isinstance(each, Metric) for each in task.metrics or [0]):
        raise refused(task, "metrics is", task.metrics, "a tuple of Metric, the loss first")
    names = [each.name for each in task.metrics]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ModelError(f"{type(task).__name__}.metrics has two of the name {twice[0]!r}; rename one.")
    if task.is_own and "headline" in vars(type(task)):
        refuse_missing(task, "metrics are", (each.name for each in task.metrics), "its headline is", task.headline)


@contextmanager
def calling(owner: object, method: str, *, errors: type[Exception] | tuple[type[Exception], ...]) -> Iterator[None]:
    """Report an error of your own code by class, method and line.

    Raises:
        ModelError: For one of ``errors``.
    """
    try:
        yield
    except PacelineError:
        raise
    except errors as error:
        frames = traceback.extract_tb(error.__traceback__)
        at = next((each for each in reversed(frames) if "site-packages" not in each.filename), frames[-1])
        raise ModelError(
            f"{type(owner).__name__}.{method} failed with {type(error).__name__}: {error} "
            f"({Path(at.filename).name}, line {at.lineno}); correct it."
        ) from error
