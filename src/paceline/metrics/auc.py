"""Area under the ROC curve of click predictions, exact for any number of processes.

The area under the ROC curve is the probability that a sample of label 1 scores higher than one of label 0, with ties
counted as one half (Mann and Whitney 1947; Hanley and McNeil 1982). It is a ratio of two integers and is computed from
exact counts. So the result is bit-identical for any sample order and any number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_AT_ONCE = 1 << 16  # scores, so that memory is little more than that of the scores

ScoredPart = tuple[NDArray[np.float32], NDArray[np.uint8]]
"""Scores of one process: logits [N, …], and labels, 0 or 1 [N, …]."""


class GatheredScores:
    """Gathers all scores: 5 bytes each, on the device until the evaluation ends, then in each process's memory.

    Args:
        shape: Dimensions of scores and labels after the first.
    """

    def __init__(self, *shape: int) -> None:
        self._scores = [torch.empty((0, *shape))]
        self._labels = [torch.empty((0, *shape), dtype=torch.uint8)]

    def add(self, values: Mapping[str, Any], ids: NDArray[np.int64]) -> None:
        """Add ``logit``, float [N, …], and ``label``, 0 or 1 [N, …]."""
        # A copy, which the next replay of a CUDA graph does not overwrite.
        self._scores.append(values["logit"].detach().to(torch.float32, copy=True))
        self._labels.append(values["label"].to(torch.uint8))

    def part(self) -> ScoredPart:
        """Return this process's data; waits for the device."""
        device = self._scores[-1].device
        scores, labels = (torch.cat([each.to(device) for each in all_]) for all_ in (self._scores, self._labels))
        self._scores, self._labels = [scores], [labels]  # not both, and not thousands of small tensors
        return scores.cpu().numpy(), labels.cpu().numpy()


class RankedScores(GatheredScores):
    """Gathers scores for ``auc`` and ``normalized_entropy``."""

    def results(self, parts: Sequence[ScoredPart]) -> dict[str, float]:
        """Compute the metrics over all processes; NaN if all labels are the same."""
        scores = np.concatenate([scores for scores, _ in parts])
        labels = np.concatenate([labels for _, labels in parts]).astype(bool)
        return {"auc": area_under_curve(scores, labels), "normalized_entropy": normalized_entropy(scores, labels)}


def area_under_curve(scores: NDArray[np.floating[Any]], labels: NDArray[np.bool_]) -> float:
    """Area under the ROC curve, in [0, 1]; NaN if all labels are the same or a score is NaN.

    Args:
        scores: Higher means more probable, [N], in any order; up to 4e9 scores.
        labels: Whether a sample is positive, [N].
    """
    positives = int(labels.sum())
    negatives = len(labels) - positives
    if positives == 0 or negatives == 0 or np.isnan(scores).any():
        return math.nan
    below, above = np.sort(scores[~labels]), np.sort(scores[labels])
    # Twice the number of correctly ordered pairs, with ties counted once: integers up to half of N squared.
    twice = sum(
        int(np.searchsorted(below, above[start : start + _AT_ONCE], side).sum())
        for start in range(0, positives, _AT_ONCE)
        for side in ("left", "right")
    )
    return twice / (2 * positives * negatives)


def normalized_entropy(scores: NDArray[np.floating[Any]], labels: NDArray[np.bool_]) -> float:
    """Mean loss divided by the entropy of the positive rate (He et al. 2014); predicting that rate gives 1.

    Args:
        scores: Logits, [N], in any order.
        labels: Whether a sample is positive, [N].
    """
    share = float(labels.mean()) if len(labels) else 0.0
    if share in (0.0, 1.0):
        return math.nan
    # Sorted, since a vectorised function may round a value differently by its position; summed exactly.
    exponents = np.where(labels, -scores, scores)
    exponents.sort()
    parts = (exponents[start : start + _AT_ONCE].astype(np.float64) for start in range(0, len(labels), _AT_ONCE))
    losses = (loss for part in parts for loss in np.logaddexp(0.0, part).tolist())
    total = math.fsum(losses) if np.isfinite(exponents).all() else math.nan
    entropy = -(share * math.log(share) + (1 - share) * math.log1p(-share))
    return total / len(labels) / entropy
