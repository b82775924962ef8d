"""How are per-sample values summed over batches, and over processes, without averaging averages?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


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
    """Sums and a count on the device, divided once at the end.

    The sums are float64 (float32 on devices without it), so that neither the size of batches nor the number of
    processes is visible in the result.
    """

    def __init__(self, metrics: tuple[Metric, ...], device: torch.device) -> None:
        self.metrics = metrics
        self.count = 0
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self.sums = torch.zeros(len(metrics), dtype=dtype, device=device)

    def add(self, values: Mapping[str, torch.Tensor]) -> None:
        """Add one batch: a tensor [N] for each metric. No host-device synchronisation."""
        self.sums += torch.stack([values[metric.name].to(self.sums.dtype).sum() for metric in self.metrics])
        self.count += len(values[self.metrics[0].name])

    def totals(self) -> torch.Tensor:
        """The sums, then the count: the one tensor to add up over processes."""
        return torch.cat([self.sums, self.sums.new_tensor([self.count])])

    def results(self, totals: torch.Tensor) -> tuple[int, dict[str, float]]:
        """Samples and metric values from (reduced) totals; the one place that waits for the device."""
        *sums, count = totals.tolist()
        if count == 0:
            return 0, {metric.name: float("nan") for metric in self.metrics}
        values = {m.name: m.scale * total / count for m, total in zip(self.metrics, sums, strict=True)}
        return round(count), values
