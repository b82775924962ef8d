"""Exact sums of per-sample values over batches and processes, without averaging averages.

Metrics that are not means, such as the area under a curve, need a :class:`Collector`.
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
    """A named metric: the mean of per-sample values, times a scale.

    Attributes:
        name: Key in records, e.g. ``top1_accuracy``.
        scale: Factor on the mean; 100 for percentages.
        higher_is_better: Whether a higher value is better.
        of: The per-sample value to sum, by its key in a task's ``score``; by default the metric's name.
        per: The per-sample value whose sum is the divisor, such as ``tokens`` if ``score`` returns token counts; None
            for the number of samples.
        is_collected: Whether one of the task's collectors computes it, because it is not a mean.
    """

    name: str
    scale: float = 1.0
    higher_is_better: bool = False
    of: str | None = None
    per: str | None = None
    is_collected: bool = False

    @property
    def summed(self) -> str:
        """The per-sample value that is summed."""
        return self.of or self.name


class Collector(Protocol):
    """Gathers each process's data for a metric that is not a mean; one instance per set of weights and evaluation.

    The result must not depend on how samples were distributed, nor on the parts' order.
    """

    def add(self, values: Mapping[str, Any], ids: NDArray[np.int64]) -> None:
        """Add the task's ``score`` of a batch. No host-device synchronisation."""
        ...

    def part(self) -> Any:
        """Return this process's data as plain values and NumPy arrays; waits for the device."""
        ...

    def results(self, parts: Sequence[Any]) -> dict[str, float]:
        """Compute the metrics from the parts of all processes."""
        ...


@runtime_checkable
class DetailedCollector(Collector, Protocol):
    """A collector that also provides details for the run's report."""

    def details(self, parts: Sequence[Any]) -> dict[str, Any]:
        """Return the content of ``evaluation/details.json``, from the parts of all processes."""
        ...


class Accumulator:
    """One row of sums per batch, kept on the device and summed exactly at the end.

    Rows are float64 (float32 on devices without it). Their total is correctly rounded and so independent of their
    order: any number of processes may score the batches.
    """

    def __init__(self, metrics: tuple[Metric, ...], device: torch.device) -> None:
        self.metrics = tuple(metric for metric in metrics if not metric.is_collected)
        divisors = (metric.per for metric in self.metrics if metric.per is not None)
        self._names = tuple(dict.fromkeys([*(metric.summed for metric in self.metrics), *divisors]))
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self._sums: list[torch.Tensor] = []
        self._counts: list[int] = []

    def add(self, values: Mapping[str, torch.Tensor]) -> None:
        """Add one batch: a tensor [N] for each summed value. No host-device synchronisation."""
        self._sums.append(torch.stack([values[name].to(self._dtype).sum() for name in self._names]))
        self._counts.append(len(values[self._names[0]]))

    def rows(self) -> Rows:
        """Return one row per batch: its number of samples, then its sums. The only method that waits for the device."""
        sums = torch.stack(self._sums).tolist() if self._sums else []
        return [(count, *row) for count, row in zip(self._counts, sums, strict=True)]

    def results(self, rows: Rows) -> tuple[int, dict[str, float]]:
        """Compute the number of samples and the metric values from the rows of all processes, in any order."""
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
    # fsum raises for infinities of both signs, and infinite sums need not be exact.
    return math.fsum(numbers) if all(map(math.isfinite, numbers)) else sum(numbers)
