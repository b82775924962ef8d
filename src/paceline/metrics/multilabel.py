"""Areas under curves and F1, exact for any number of processes.

Ranks and counts are integers, so the results are bit-identical for any sample order and any number of processes. The
tests compare them with scikit-learn. The area under the ROC curve is the probability that a sample of label 1 scores
higher than one of label 0, with ties counted as one half (Mann and Whitney 1947; Hanley and McNeil 1982): a ratio of
two integers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.metrics.accumulator import Metric

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


MULTILABEL_METRICS = tuple(
    Metric(name=name, higher_is_better=True, is_collected=True) for name in ("map", "macro_f1", "micro_f1")
)
_LEAST = 1e-6  # a threshold's distance from 0 and 1


class LabelScores(GatheredScores):
    """Gathers label scores; implements :class:`paceline.metrics.accumulator.DetailedCollector`.

    Args:
        classes: Class names.
        thresholds: Probability above which each class is predicted, in (0, 1).
    """

    def __init__(self, classes: Sequence[str], thresholds: Sequence[float]) -> None:
        super().__init__(len(classes))
        self._classes, self._thresholds = classes, thresholds

    def results(self, parts: Sequence[ScoredPart]) -> dict[str, float]:
        """Compute the metrics in percent; NaN if no sample has a label or a score is NaN.

        Means over classes exclude classes without samples; ``micro_f1`` counts their false positives.
        """
        scores = self._of_classes(parts)
        valid = [each for each in scores if each["count"]]
        if not valid or any(math.isnan(each["average_precision"]) for each in valid):
            return dict.fromkeys((each.name for each in MULTILABEL_METRICS), math.nan)
        means = (math.fsum(each[key] for each in valid) / len(valid) for key in ("average_precision", "f1"))
        correct, predicted, positive = (sum(each[key] for each in scores) for key in ("right", "given", "count"))
        return dict(zip(("map", "macro_f1"), means, strict=True)) | {
            "micro_f1": 100 * _f1(correct, predicted, positive)
        }

    def details(self, parts: Sequence[ScoredPart]) -> dict[str, Any]:
        """Return the scores of each class in percent, lowest F1 first, classes without samples last.

        ``best_threshold`` maximises F1 on these samples; like ``best_f1`` it is fitted to them.
        """
        scores = self._of_classes(parts)
        return {"label_scores": sorted(scores, key=lambda each: (not each["count"], each["f1"], each["class"]))}

    def _of_classes(self, parts: Sequence[ScoredPart]) -> list[dict[str, Any]]:
        scores = np.concatenate([scores for scores, _ in parts])
        labels = np.concatenate([labels for _, labels in parts])
        rows = []
        for index, (name, threshold) in enumerate(zip(self._classes, self._thresholds, strict=True)):
            is_given = scores[:, index].astype(np.float64) > math.log(threshold / (1 - threshold))
            has_label = labels[:, index] == 1
            correct, predicted, count = (int(each.sum()) for each in (is_given & has_label, is_given, has_label))
            average, best_f1, best = precision_and_best_f1(scores[:, index], has_label)
            of_class: dict[str, Any] = {"class": name, "count": count, "given": predicted, "right": correct}
            of_class |= {
                "precision": 100 * correct / predicted if predicted else 0.0,
                "recall": 100 * correct / count if count else 0.0,
                "f1": 100 * _f1(correct, predicted, count),
                "average_precision": 100 * average,
            }
            rows.append(of_class | {"threshold": threshold, "best_f1": 100 * best_f1, "best_threshold": best})
        return rows


def precision_and_best_f1(scores: NDArray[np.float32], labels: NDArray[np.bool_]) -> tuple[float, float, float]:
    """Return average precision, the highest F1 over thresholds, and that threshold; NaN without positives.

    Average precision is the sum over distinct scores of the precision times the gain in recall. The threshold is a
    probability, halfway in logits to the next lower score.

    Args:
        scores: Logits, [N], in any order.
        labels: Whether a sample has the label, [N].
    """
    positives = int(labels.sum())
    if positives == 0 or np.isnan(scores).any():
        return math.nan, math.nan, math.nan
    # Replace infinities by the largest finite numbers, so that midpoints exist.
    distinct, inverse = np.unique(np.nan_to_num(-scores), return_inverse=True)
    predicted = np.cumsum(np.bincount(inverse))
    added = np.bincount(inverse[labels], minlength=len(distinct))
    right = np.cumsum(added)
    average = math.fsum((added * (right / predicted)).tolist()) / positives
    f1 = 2 * right / (predicted + positives)
    best = int(f1.argmax())
    lower = -distinct[best + 1] if best + 1 < len(distinct) else -distinct[best] - 1
    middle = (float(lower) - float(distinct[best])) / 2
    probability = 0.5 * (1 + math.tanh(middle / 2))
    return average, float(f1[best]), min(max(probability, _LEAST), 1 - _LEAST)


def _f1(correct: int, predicted: int, positive: int) -> float:
    return 2 * correct / (predicted + positive) if predicted + positive else 0.0
