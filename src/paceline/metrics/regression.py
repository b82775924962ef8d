"""Errors of predicted numbers: mean absolute, root mean squared and R², exact over any number of processes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.metrics.accumulator import Metric

_NAMES = {"mae": False, "rmse": False, "r2": True}
"""What is measured, and whether more of it is better."""


def error_metrics(columns: Sequence[str]) -> tuple[Metric, ...]:
    """The mean over columns of each metric, and where there are several columns, each column's own."""
    ends = ("", *(f"_{column}" for column in columns)) if len(columns) > 1 else ("",)
    return tuple(
        Metric(name=f"{name}{end}", higher_is_better=is_higher, is_collected=True)
        for end in ends
        for name, is_higher in _NAMES.items()
    )


class NumberErrors:
    """Sums errors of columns of numbers; satisfies :class:`paceline.metrics.accumulator.Collector`.

    Of each batch a few sums are kept, which are added up exactly: the batches may be scored by any processes.

    Args:
        columns: What they are called.
        scale: What one is in the user's units, of each column.
    """

    def __init__(self, columns: Sequence[str], scale: Sequence[float]) -> None:
        self._columns, self._scale = columns, scale
        self._sums: list[Tensor] = []

    def add(self, values: Mapping[str, Any], ids: NDArray[np.int64]) -> None:
        """Take ``error`` and ``target``, float [N, columns], both standardised."""
        precise = torch.float32 if values["error"].device.type == "mps" else torch.float64
        error, target = values["error"].to(precise), values["target"].to(precise)
        columns = (torch.ones_like(error), error.abs(), error.square(), target, target.square())
        self._sums.append(torch.stack([each.sum(dim=0) for each in columns]))

    def part(self) -> NDArray[np.float64]:
        """Sums of each batch, [batches, 5, columns]; waits for the device."""
        if not self._sums:
            return np.empty((0, 5, len(self._columns)))
        return torch.stack(self._sums).cpu().numpy().astype(np.float64)

    def results(self, parts: Sequence[NDArray[np.float64]]) -> dict[str, float]:
        """The metrics over all processes; not numbers where there are no samples or an error is not finite."""
        sums = np.concatenate(parts)
        found = []
        for place, scale in enumerate(self._scale):
            count, absolute, squared, total, squares = (_total(sums[:, each, place]) for each in range(5))
            spread = squares - total * total / count if count else math.nan
            # As in scikit-learn where all targets are the same.
            of_equals = math.nan if math.isnan(squared) else float(squared == 0)
            r2 = of_equals if spread <= 0 else 1 - squared / spread
            mean, mean_square = (each / count if count else math.nan for each in (absolute, squared))
            found.append((scale * mean, scale * math.sqrt(mean_square), r2))
        results = {name: sum(each) / len(found) for name, each in zip(_NAMES, zip(*found, strict=True), strict=True)}
        if len(found) > 1:
            for column, numbers in zip(self._columns, found, strict=True):
                results |= {f"{name}_{column}": number for name, number in zip(_NAMES, numbers, strict=True)}
        return results


def _total(numbers: NDArray[np.float64]) -> float:
    return math.fsum(numbers) if np.isfinite(numbers).all() else math.nan
