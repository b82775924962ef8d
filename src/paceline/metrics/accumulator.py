"""How are per-sample values summed over batches, and over processes, without averaging averages?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

Rows = list[tuple[float, ...]]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A named figure of merit: the mean of per-sample values, times a scale.

    Attributes:
        name: Key in records, e.g. ``top1_accuracy``.
        scale: Factor on the mean; 100 for percentages.
        higher_is_better: Which of two values is better.
    """

    name: str
    scale: float = 1.0
    higher_is_better: bool = False


class Accumulator:
    """One row of sums per batch, kept on the device, and added up exactly at the end.

    Rows are float64 (float32 on devices without it). Their total is the correctly rounded one, which does not depend on
    their order: batches may be scored by any number of processes.
    """

    def __init__(self, metrics: tuple[Metric, ...], device: torch.device) -> None:
        self.metrics = metrics
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self._sums: list[torch.Tensor] = []
        self._counts: list[int] = []

    def add(self, values: Mapping[str, torch.Tensor]) -> None:
        """Add one batch: a tensor [N] for each metric. No host-device synchronisation."""
        self._sums.append(torch.stack([values[metric.name].to(self._dtype).sum() for metric in self.metrics]))
        self._counts.append(len(values[self.metrics[0].name]))

    def rows(self) -> Rows:
        """One row per batch: its number of samples, then its sums; the one place that waits for the device."""
        sums = torch.stack(self._sums).tolist() if self._sums else []
        return [(count, *row) for count, row in zip(self._counts, sums, strict=True)]

    def results(self, rows: Rows) -> tuple[int, dict[str, float]]:
        """Samples and metric values from the rows of all processes, in any order."""
        count = round(sum(row[0] for row in rows))
        if count == 0:
            return 0, {metric.name: math.nan for metric in self.metrics}
        totals = (_exact_sum(row[1 + index] for row in rows) for index in range(len(self.metrics)))
        return count, {m.name: m.scale * total / count for m, total in zip(self.metrics, totals, strict=True)}


def _exact_sum(values: Iterable[float]) -> float:
    numbers = list(values)
    # fsum refuses to add infinities of both signs, and has no need to be exact about them.
    return math.fsum(numbers) if all(map(math.isfinite, numbers)) else sum(numbers)
