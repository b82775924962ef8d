"""Intersection over union of pixel classes, from integer counts: exact for any number of processes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.metrics.accumulator import Metric
from paceline.metrics.regression import identifier_names

_MOST_CLASSES = 20  # up to this number, each class has a metric


def pixel_metrics(classes: Sequence[str]) -> tuple[Metric, ...]:
    """Return mean IoU and pixel accuracy in percent, and the IoU of each class if there are at most 20."""
    each = identifier_names(classes) if len(classes) <= _MOST_CLASSES else ()
    names = ("miou", "pixel_accuracy", *(f"iou_{name}" for name in each))
    return tuple(Metric(name=name, higher_is_better=True, is_collected=True) for name in names)


class PixelConfusion:
    """Counts pixels by class and prediction; implements :class:`paceline.metrics.accumulator.DetailedCollector`.

    Args:
        classes: Class names.
        ignored: The value of pixels that are not scored.
    """

    def __init__(self, classes: Sequence[str], ignored: int) -> None:
        self._classes, self._ignored = tuple(classes), ignored
        self._counts: Tensor | None = None

    def add(self, values: Mapping[str, Any], ids: NDArray[np.int64]) -> None:
        """Add ``target`` and ``predicted``, integers [N, H, W]."""
        labels, size = values["target"].flatten().long(), len(self._classes)
        cells = torch.where(labels == self._ignored, size**2, labels * size + values["predicted"].flatten())
        if self._counts is None:
            self._counts = torch.zeros(size**2 + 1, dtype=torch.int64, device=cells.device)
        self._counts.index_add_(0, cells, torch.ones_like(cells))

    def part(self) -> NDArray[np.int64]:
        """Return pixel counts, int64 [classes (rows), predictions (columns)]; waits for the device."""
        size = len(self._classes)
        if self._counts is None:
            return np.zeros((size, size), dtype=np.int64)
        return self._counts[:-1].reshape(size, size).cpu().numpy()

    def results(self, parts: Sequence[NDArray[np.int64]]) -> dict[str, float]:
        """Compute the metrics in percent. A class in neither masks nor predictions is NaN and not in the mean."""
        counts = sum(parts[1:], start=parts[0])
        ious = _ious(counts)
        valid = [each for each in ious if not math.isnan(each)]
        pixels = int(counts.sum())
        means = {
            "miou": math.fsum(valid) / len(valid) if valid else math.nan,
            "pixel_accuracy": 100 * int(np.trace(counts)) / pixels if pixels else math.nan,
        }
        names = [each.name for each in pixel_metrics(self._classes)[len(means) :]]
        return means | dict(zip(names, ious, strict=False))

    def details(self, parts: Sequence[NDArray[np.int64]]) -> dict[str, Any]:
        """Return the IoU and pixel count of each present class, lowest IoU first."""
        counts = sum(parts[1:], start=parts[0])
        rows = zip(self._classes, counts.sum(axis=1).tolist(), _ious(counts), strict=True)
        known = [{"class": name, "count": count, "iou": iou} for name, count, iou in rows if not math.isnan(iou)]
        return {"class_iou": sorted(known, key=lambda row: row["iou"])}


def _ious(counts: NDArray[np.int64]) -> list[float]:
    """Intersection over union of each class, in percent; NaN if the union is empty."""
    intersection = np.diag(counts)
    union = counts.sum(axis=0) + counts.sum(axis=1) - intersection
    return [
        100 * overlap / total if total else math.nan
        for overlap, total in zip(intersection.tolist(), union.tolist(), strict=True)
    ]
