"""Regression errors: mean absolute, root mean squared and R², exact for any number of processes.

For the run's report a sample of (target, prediction) pairs is kept, the same for any number of processes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.metrics.accumulator import Metric

_NAMES = {"mae": False, "rmse": False, "r2": True}
"""Metric names, and whether higher is better."""

_MOST_POINTS = 1000
NumberPart = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Sums of each batch, [batches, 5, columns]; and numbers, targets and predictions of some samples."""


def identifier_names(columns: Sequence[str]) -> tuple[str, ...]:
    """Convert column names to metric names (letters, digits, underscores); numbered if that creates duplicates."""
    names = tuple(re.sub(r"\W+", "_", column) for column in columns)
    return names if len(set(names)) == len(names) else tuple(f"column{index}" for index, _ in enumerate(names))


def error_metrics(columns: Sequence[str]) -> tuple[Metric, ...]:
    """Return each metric's mean over columns and, with several columns, its value per column."""
    ends = ("", *(f"_{column}" for column in identifier_names(columns))) if len(columns) > 1 else ("",)
    return tuple(
        Metric(name=f"{name}{end}", higher_is_better=is_higher, is_collected=True)
        for end in ends
        for name, is_higher in _NAMES.items()
    )


class NumberErrors:
    """Sums errors of numeric columns; implements :class:`paceline.metrics.accumulator.DetailedCollector`.

    Keeps a few sums per batch and adds them exactly, so any number of processes may score the batches. All targets and
    predictions stay on the device until the evaluation ends.

    Args:
        columns: Column names.
        scale: Standard deviation of each column, in the user's units.
        mean: Mean of each column, in the user's units.
    """

    def __init__(self, columns: Sequence[str], scale: Sequence[float], mean: Sequence[float]) -> None:
        self._columns, self._scale, self._mean = columns, scale, mean
        self._sums: list[Tensor] = []
        self._pairs: list[Tensor] = []
        self._ids: list[NDArray[np.int64]] = []

    def add(self, values: Mapping[str, Any], ids: NDArray[np.int64]) -> None:
        """Add ``error`` and ``target``, float [N, columns], both standardised."""
        precise = torch.float32 if values["error"].device.type == "mps" else torch.float64
        error, target = values["error"].to(precise), values["target"].to(precise)
        columns = (torch.ones_like(error), error.abs(), error.square(), target, target.square())
        self._sums.append(torch.stack([each.sum(dim=0) for each in columns]))
        self._pairs.append(torch.stack((target, target + error), dim=1).float())
        self._ids.append(ids)

    def part(self) -> NumberPart:
        """Return this process's data; waits for the device."""
        if not self._sums:
            return np.empty((0, 5, len(self._columns))), np.empty((0, 1 + 2 * len(self._columns)))
        ids = np.concatenate(self._ids)
        chosen = _some(ids)
        pairs = torch.cat(self._pairs)[torch.from_numpy(chosen)].cpu().numpy().astype(np.float64)
        pairs = pairs * np.array(self._scale) + np.array(self._mean)
        points = np.column_stack((ids[chosen], pairs.reshape(len(chosen), -1)))
        return torch.stack(self._sums).cpu().numpy().astype(np.float64), points

    def details(self, parts: Sequence[NumberPart]) -> dict[str, Any]:
        """Return targets and predictions of at most 1,000 samples, sorted by sample number."""
        points = np.concatenate([points for _, points in parts])
        points = points[np.isfinite(points).all(axis=1)]
        points = points[_some(points[:, 0])]
        width = len(self._columns)
        return {
            "columns": list(self._columns),
            "points": [
                {"sample": int(row[0]), "actual": _plain(row[1 : 1 + width]), "predicted": _plain(row[1 + width :])}
                for row in points
            ],
        }

    def results(self, parts: Sequence[NumberPart]) -> dict[str, float]:
        """Compute the metrics over all processes; NaN without samples or if an error is not finite."""
        sums = np.concatenate([sums for sums, _ in parts])
        errors = []
        for index, scale in enumerate(self._scale):
            count, absolute, squared, total, squares = (_total(sums[:, each, index]) for each in range(5))
            spread = squares - total * total / count if count else math.nan
            # As in scikit-learn if all targets are the same.
            of_equals = math.nan if math.isnan(squared) else float(squared == 0)
            r2 = of_equals if spread <= 1e-14 * squares else 1 - squared / spread
            mean, mean_square = (each / count if count else math.nan for each in (absolute, squared))
            errors.append((scale * mean, scale * math.sqrt(mean_square), r2))
        results = {name: sum(each) / len(errors) for name, each in zip(_NAMES, zip(*errors, strict=True), strict=True)}
        if len(errors) > 1:
            for column, numbers in zip(identifier_names(self._columns), errors, strict=True):
                results |= {f"{name}_{column}": number for name, number in zip(_NAMES, numbers, strict=True)}
        return results


def _some(ids: NDArray[Any]) -> NDArray[np.int64]:
    """Return indices of some of the samples, sorted by number and chosen by a hash of the number (Knuth 1973)."""
    hashes = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    chosen = np.argsort(hashes)[:_MOST_POINTS]
    return chosen[np.argsort(ids[chosen])]


def _plain(numbers: NDArray[np.float64]) -> list[float]:
    return [float(f"{number:.6g}") for number in numbers]


def _total(numbers: NDArray[np.float64]) -> float:
    return math.fsum(numbers) if np.isfinite(numbers).all() else math.nan
