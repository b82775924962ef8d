"""Average precision and F1 of multi-label images, exact for any number of processes.

Ranks and counts are integers, so the results are bit-identical for any sample order and any number of processes. The
tests compare both with scikit-learn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.metrics.accumulator import Metric
from paceline.metrics.multilabel import GatheredScores, ScoredPart

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
