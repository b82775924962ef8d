"""Metrics named in a recipe: functions of the scores and targets of all held-out samples."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import RecipeError
from paceline.metrics.accumulator import Metric
from paceline.plugins.references import is_reference, load_reference

ScoredPart = tuple[NDArray[np.int64], NDArray[np.float32], NDArray[Any]]
"""Sample numbers, [N], with their scores and targets."""


def named_metric(name: str, options: Mapping[str, Any]) -> Any:
    """Create a metric from ``evaluate.metrics``.

    Raises:
        RecipeError: If its factory cannot be imported, or does not accept the options.
    """
    key, arguments = f"evaluate.metrics.{name}", dict(options)
    reference = arguments.pop("name", None)
    if not isinstance(reference, str) or not is_reference(reference):
        raise RecipeError(
            f"{key} has name={reference!r}, but it must name a factory: package.module:factory, torchmetrics' or yours."
        )
    # The current directory is not searched for torchmetrics, which needs no trust.
    factory = load_reference(reference, RecipeError, installed=reference.startswith("torchmetrics."))
    try:
        return factory(**arguments)
    except (TypeError, ValueError) as error:
        raise RecipeError(
            f"{key}: {reference} does not take {arguments}: {error}. Name a factory: called with the options, it gives "
            "a function of scores and targets."
        ) from error


def absent_classes(metrics: Mapping[str, Any], labels: NDArray[Any], classes: Sequence[str]) -> list[str]:
    """Return a note if a metric is named and a class has no held-out sample: it may be undefined, or taken for 0."""
    is_known = bool(metrics) and len(labels) > 0 and labels.ndim == 1
    absent = np.setdiff1d(np.arange(len(classes)), labels).tolist() if is_known else []
    names = ", ".join(repr(classes[each]) for each in absent[:3]) + ", …" * (len(absent) > 3)
    why = f"{len(absent):,} of {len(classes):,} classes have no held-out sample: {names}"
    return [f"{', '.join(metrics)} may be undefined or 0, since {why}"] if absent else []


class NamedMetrics:
    """Gathers scores and targets; implements :class:`paceline.metrics.accumulator.Collector`.

    A metric is called once, with samples sorted by number, so the result does not depend on the number of processes.
    """

    def __init__(self, config: Mapping[str, Mapping[str, Any]]) -> None:
        self._made = {name: named_metric(name, options) for name, options in config.items()}
        self._batches: list[tuple[NDArray[np.int64], torch.Tensor, torch.Tensor]] = []

    @classmethod
    def of(cls, metrics: Mapping[str, Any]) -> Self:
        """Gather for metrics that were given as objects, which are not changed."""
        gathered = cls({})
        gathered._made = copy.deepcopy(dict(metrics))
        return gathered

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The metrics by name; higher is better unless the metric has a false ``higher_is_better``."""
        return tuple(
            Metric(name=name, higher_is_better=bool(getattr(made, "higher_is_better", True)), is_collected=True)
            for name, made in self._made.items()
        )

    def add(self, values: Mapping[str, Any], ids: NDArray[np.int64]) -> None:
        """Add ``logit``, float [N, …], and ``label``, [N, …]."""
        if not self._made:
            return
        if missing := {"logit", "label"} - values.keys():
            raise RecipeError(
                f"evaluate.metrics needs {' and '.join(sorted(missing))} from the task's score(), which gives only "
                f"{', '.join(values)}: return it there, or leave evaluate.metrics out."
            )
        # Kept on the host: all scores of an evaluation may not fit into device memory.
        self._batches.append((ids, values["logit"].detach().float().cpu(), values["label"].cpu()))

    def part(self) -> ScoredPart | None:
        """Return this process's data; None without samples."""
        if not self._batches:
            return None
        ids, scores, targets = zip(*self._batches, strict=True)
        return np.concatenate(ids), torch.cat(scores).numpy(), torch.cat(targets).numpy()

    def results(self, parts: Sequence[ScoredPart | None]) -> dict[str, float]:
        """Compute the metrics over all processes; NaN without samples.

        Raises:
            RecipeError: If a metric does not return a number.
        """
        present = [part for part in parts if part is not None]
        if not present:
            return dict.fromkeys(self._made, math.nan)
        ids, scores, targets = (np.concatenate(each) for each in zip(*present, strict=True))
        order = np.argsort(ids, kind="stable")
        in_order = torch.from_numpy(scores[order]), torch.from_numpy(targets[order])
        results = {}
        for name, made in self._made.items():
            try:
                results[name] = float(made(*in_order))
            except Exception as error:
                shapes = f"scores {list(scores.shape)} and targets {list(targets.shape)}"
                raise RecipeError(
                    f"evaluate.metrics.{name} gave no number for {shapes} ({type(error).__name__}: {error}): correct "
                    "its options."
                ) from error
        return results
