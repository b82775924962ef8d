"""Sums of per-sample values over batches and processes, without averages of averages.

Metrics that are not sums, such as the area under a curve, need a :class:`Collector`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

Rows = list[tuple[float, ...]]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A named figure of merit: the mean of per-sample values, times a scale.

    Attributes:
        name: Key in records, e.g. ``top1_accuracy``.
        scale: Factor on the mean; 100 for percentages.
        higher_is_better: Which of two values is better.
        of: Which per-sample value is summed up, as a task's ``score`` names it; the metric's own name unless given.
        per: By which per-sample value's sum that is divided: ``tokens``, say, where ``score`` gives their number; None
            for the number of samples.
        is_collected: Whether it comes from one of the task's collectors, and is no mean.
    """

    name: str
    scale: float = 1.0
    higher_is_better: bool = False
    of: str | None = None
    per: str | None = None
    is_collected: bool = False

    @property
    def summed(self) -> str:
        """The per-sample value that is summed up."""
        return self.of or self.name


class Collector(Protocol):
    """Gathers of each process what a metric needs that is no mean; one for each set of weights and evaluation.

    What comes of all parts together must not depend on how the samples were shared out, nor on the parts' order.
    """

    def add(self, values: Mapping[str, Any], ids: NDArray[np.int64]) -> None:
        """Take what the task's ``score`` gave for the samples of a batch. No host-device synchronisation."""
        ...

    def part(self) -> Any:
        """This process's data, as plain values and NumPy arrays; waits for the device."""
        ...

    def results(self, parts: Sequence[Any]) -> dict[str, float]:
        """The metrics, from the parts of all processes."""
        ...


@runtime_checkable
class DetailedCollector(Collector, Protocol):
    """A collector that has more to say than metrics, for the run's report."""

    def details(self, parts: Sequence[Any]) -> dict[str, Any]:
        """What ``evaluation/details.json`` says, from the parts of all processes."""
        ...


class Accumulator:
    """One row of sums per batch, kept on the device, and added up exactly at the end.

    Rows are float64 (float32 on devices without it). Their total is the correctly rounded one, which does not depend on
    their order: batches may be scored by any number of processes.
    """

    def __init__(self, metrics: tuple[Metric, ...], device: torch.device) -> None:
        self.metrics = tuple(metric for metric in metrics if not metric.is_collected)
        divisors = (metric.per for metric in self.metrics if metric.per is not None)
        self._names = tuple(dict.fromkeys([*(metric.summed for metric in self.metrics), *divisors]))
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self._sums: list[torch.Tensor] = []
        self._counts: list[int] = []

    def add(self, values: Mapping[str, torch.Tensor]) -> None:
        """Add one batch: a tensor [N] for each value that is summed up. No host-device synchronisation."""
        self._sums.append(torch.stack([values[name].to(self._dtype).sum() for name in self._names]))
        self._counts.append(len(values[self._names[0]]))

    def rows(self) -> Rows:
        """One row per batch: its number of samples, then its sums; the one place that waits for the device."""
        sums = torch.stack(self._sums).tolist() if self._sums else []
        return [(count, *row) for count, row in zip(self._counts, sums, strict=True)]

    def results(self, rows: Rows) -> tuple[int, dict[str, float]]:
        """Samples and metric values from the rows of all processes, in any order."""
        count = round(sum(row[0] for row in rows))
        if count == 0:
            return 0, {metric.name: math.nan for metric in self.metrics}
        totals = {name: exact_sum(row[1 + index] for row in rows) for index, name in enumerate(self._names)}
        return count, {m.name: self._mean(m, totals, count) for m in self.metrics}

    @staticmethod
    def _mean(metric: Metric, totals: Mapping[str, float], count: int) -> float:
        number = count if metric.per is None else totals[metric.per]
        return metric.scale * totals[metric.summed] / number if number else math.nan


def exact_sum(values: Iterable[float]) -> float:
    """Return the correctly rounded sum, which does not depend on the order."""
    numbers = list(values)
    # fsum refuses to add infinities of both signs, and has no need to be exact about them.
    return math.fsum(numbers) if all(map(math.isfinite, numbers)) else sum(numbers)
