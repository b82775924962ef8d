"""Precision, recall and F1 of named entities, from integer counts: exact for any number of processes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.metrics.accumulator import Metric

ENTITY_METRICS = tuple(
    Metric(name=name, scale=100.0, higher_is_better=True, is_collected=True)
    for name in ("entity_f1", "entity_precision", "entity_recall")
)


class EntityScores:
    """Counts entities by type; implements :class:`paceline.metrics.accumulator.DetailedCollector`.

    Args:
        kinds: The types' names.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        self._kinds, self._counts = tuple(kinds), list[torch.Tensor]()

    def add(self, values: Mapping[str, Any], ids: NDArray[np.int64]) -> None:
        """Add ``entities``, int64 [N, types, 3]: those found with the right words and type, all found, and all true."""
        self._counts.append(values["entities"].sum(dim=0))

    def part(self) -> NDArray[np.int64]:
        """Return the counts, int64 [types, 3]; waits for the device."""
        counts = self._counts or [torch.zeros(len(self._kinds), 3, dtype=torch.int64)]
        return torch.stack(counts).sum(dim=0).cpu().numpy()

    def results(self, parts: Sequence[NDArray[np.int64]]) -> dict[str, float]:
        """Compute the metrics over all types in percent, as seqeval's micro averages; F1 without entities is NaN."""
        scores = _scores(*np.sum(parts, axis=(0, 1)).tolist())
        if not np.sum(parts):
            scores["f1"] = math.nan
        return {metric.name: scores[metric.name.removeprefix("entity_")] for metric in ENTITY_METRICS}

    def details(self, parts: Sequence[NDArray[np.int64]]) -> dict[str, Any]:
        """Return the scores of each type in percent and its number of true entities, lowest F1 first."""
        counts = zip(self._kinds, np.sum(parts, axis=0).tolist(), strict=True)
        rows = [{"class": kind, "count": each[2], **_scores(*each)} for kind, each in counts if any(each)]
        return {"entity_scores": sorted(rows, key=lambda row: (row["f1"], row["class"]))}


def _scores(right: int, found: int, true: int) -> dict[str, float]:
    """Return precision, recall and F1 in percent; 0 / 0 counts as 0."""
    pairs = {"precision": (right, found), "recall": (right, true), "f1": (2 * right, found + true)}
    return {name: 100 * part / total if total else 0.0 for name, (part, total) in pairs.items()}
