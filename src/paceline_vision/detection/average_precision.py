"""COCO's mean average precision.

As defined by Lin et al. (2014) and their published program: detections of a class, by descending score, are matched
with the objects of that class in their picture at ten overlap thresholds, 0.5 to 0.95. Precision is averaged over 101
recall levels, then over thresholds and classes. The tests compare it with that program's results.

Processes exchange little data: scores, classes and overlaps of each picture, but no masks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Overlaps = NDArray[np.float64]
"""Overlap of each detection with each object, [D, G]."""

THRESHOLDS = np.linspace(0.5, 0.95, 10)
_RECALLS = np.linspace(0, 1, 101)
_MOST_DETECTIONS = 100
_ALMOST_ONE = 1 - 1e-10


@dataclass(frozen=True, kw_only=True)
class ImageDetections:
    """Detections in one picture, with its ground truth.

    Attributes:
        sample: Its number.
        scores: Score of each of D detections, float64 [D].
        labels: Their classes, int64 [D].
        true_labels: The classes of the G objects, int64 [G].
        crowd: Which objects are crowds, bool [G].
        overlaps: Intersection over union by kind, ``box`` or ``mask``; for a crowd, the share of the detection inside
            it.
    """

    sample: int
    scores: NDArray[np.float64]
    labels: NDArray[np.int64]
    true_labels: NDArray[np.int64]
    crowd: NDArray[np.bool_]
    overlaps: dict[str, Overlaps]


class AveragePrecision:
    """Collects detections; implements :class:`paceline.metrics.accumulator.DetailedCollector`.

    Args:
        classes: Names of the classes from label 1 on.
        kinds: What to compare: ``box``, ``mask``.
    """

    def __init__(self, classes: Sequence[str], kinds: Sequence[str] = ("box",)) -> None:
        self._classes, self._kinds = tuple(classes), tuple(kinds)
        self._pictures: list[ImageDetections] = []
        self._by_class: dict[str, dict[int, NDArray[np.float64]]] = {}

    def add(self, values: Mapping[str, Any], ids: NDArray[np.int64]) -> None:
        """Compare a batch's detections with its objects.

        The host waits for the device, as it already did for the detections. Kept there, the masks of a few pictures
        would fill its memory.

        Args:
            values: ``found`` and ``truth``, each with a dict per picture: ``boxes`` [·, 4], ``labels``, ``scores``
                for detections, ``crowd`` for objects, and bool ``masks`` [·, H, W] if they are compared.
            ids: The pictures' numbers.
        """
        for sample, detections, truth in zip(ids.tolist(), values["found"], values["truth"], strict=True):
            crowd = truth["crowd"].cpu().numpy()
            overlaps = {"box": box_overlaps(_array(detections["boxes"]), _array(truth["boxes"]), crowd)}
            if "mask" in self._kinds:
                overlaps["mask"] = mask_overlaps(detections["masks"], truth["masks"], crowd)
            picture = ImageDetections(
                sample=sample,
                scores=_array(detections["scores"]),
                labels=detections["labels"].cpu().numpy(),
                true_labels=truth["labels"].cpu().numpy(),
                crowd=crowd,
                overlaps=overlaps,
            )
            self._pictures.append(picture)

    def part(self) -> list[ImageDetections]:
        """Return this process's data."""
        return self._pictures

    def results(self, parts: Sequence[list[ImageDetections]]) -> dict[str, float]:
        """Compute mean average precision of each kind in percent, overall and at threshold 0.5; NaN without objects."""
        pictures = sorted((each for part in parts for each in part), key=lambda each: each.sample)
        results = {}
        for kind in self._kinds:
            self._by_class[kind] = found = average_precisions(pictures, kind)
            by_threshold = np.mean(list(found.values()), axis=0) if found else np.full(len(THRESHOLDS), np.nan)
            results[f"{kind}_map"] = float(100 * by_threshold.mean())
            results[f"{kind}_map50"] = float(100 * by_threshold[0])
        return results

    def details(self, parts: Sequence[list[ImageDetections]]) -> dict[str, Any]:
        """Return average precision and number of objects of each class with objects, lowest first; after `results`."""
        counts = Counter(label for part in parts for each in part for label in each.true_labels[~each.crowd].tolist())
        keys = {"box": "average_precision", "mask": "mask_average_precision"}
        rows: list[dict[str, Any]] = [
            {
                "class": self._classes[label - 1],
                "count": counts[label],
                **{keys[kind]: float(100 * self._by_class[kind][label].mean()) for kind in self._kinds},
            }
            for label in self._by_class[self._kinds[0]]
        ]
        return {"class_ap": sorted(rows, key=lambda row: row["average_precision"])}


def average_precisions(pictures: Sequence[ImageDetections], kind: str) -> dict[int, NDArray[np.float64]]:
    """Return the average precision of each class with objects at each threshold, [10], by label.

    Pictures must be in the order of their numbers.
    """
    classes = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *(each.true_labels for each in pictures)]))
    found = {int(label): _average_precisions(pictures, kind, int(label)) for label in classes}
    return {label: each for label, each in found.items() if each is not None}


def _average_precisions(pictures: Sequence[ImageDetections], kind: str, label: int) -> NDArray[np.float64] | None:
    """Return a class's average precision at each threshold, [10]; None if all its objects are crowds."""
    scores, true_positives, false_positives, objects = [], [], [], 0
    for each in pictures:
        detections, truths = np.flatnonzero(each.labels == label), np.flatnonzero(each.true_labels == label)
        if not len(detections) and not len(truths):
            continue
        objects += int((~each.crowd[truths]).sum())
        top = detections[np.argsort(-each.scores[detections], kind="stable")][:_MOST_DETECTIONS]
        matched, ignored = _matched(each.overlaps[kind][np.ix_(top, truths)], each.crowd[truths])
        scores.append(each.scores[top])
        true_positives.append(matched & ~ignored)
        false_positives.append(~matched)
    if not objects:
        return None
    order = np.argsort(-np.concatenate(scores), kind="stable")
    hits = np.cumsum(np.concatenate(true_positives, axis=1)[:, order], axis=1, dtype=np.float64)
    alarms = np.cumsum(np.concatenate(false_positives, axis=1)[:, order], axis=1, dtype=np.float64)
    return np.array([_area(*rows, objects) for rows in zip(hits, alarms, strict=True)])


def _matched(overlaps: Overlaps, crowd: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which detections, by descending score, match an object at each threshold and which only a crowd, [10, D].

    Each takes the unmatched object with the largest overlap, or else a crowd, which can match repeatedly. Ties go to
    the last object, as in the published program.
    """
    matched = np.zeros((len(THRESHOLDS), len(overlaps)), dtype=bool)
    ignored = np.zeros_like(matched)
    if not overlaps.size:
        return matched, ignored
    for level, threshold in enumerate(np.minimum(THRESHOLDS, _ALMOST_ONE)):
        is_left = ~crowd
        for index, row in enumerate(overlaps):
            near = row >= threshold
            if not near.any():
                continue
            free = near & is_left
            if free.any():
                best = np.where(free, row, -1)
                is_left[len(best) - 1 - int(np.argmax(best[::-1]))] = False
                matched[level, index] = True
            elif (near & crowd).any():
                matched[level, index] = ignored[level, index] = True
    return matched, ignored


def _area(hits: NDArray[np.float64], alarms: NDArray[np.float64], objects: int) -> float:
    """Return the mean over recall levels of the best precision at that recall or more."""
    precision = hits / (hits + alarms + np.spacing(1))
    best = np.maximum.accumulate(precision[::-1])[::-1]
    reached = np.searchsorted(hits / objects, _RECALLS, side="left")
    return float(np.concatenate([best, [0.0]])[np.minimum(reached, len(best))].mean())


def box_overlaps(detections: NDArray[np.float64], truths: NDArray[np.float64], crowd: NDArray[np.bool_]) -> Overlaps:
    """Return the overlaps of boxes [D, 4] and [G, 4], given by their edges."""
    top_left = np.maximum(detections[:, None, :2], truths[None, :, :2])
    bottom_right = np.minimum(detections[:, None, 2:], truths[None, :, 2:])
    common = np.prod(np.clip(bottom_right - top_left, 0, None), axis=2)
    detection_areas, truth_areas = (np.prod(each[:, 2:] - each[:, :2], axis=1) for each in (detections, truths))
    return _over_union(common, detection_areas, truth_areas, crowd)


def mask_overlaps(detections: Tensor, truths: Tensor, crowd: NDArray[np.bool_]) -> Overlaps:
    """Return the overlaps of masks [D, H, W] and [G, H, W], nonzero inside objects; exact below 2^24 pixels."""
    # Zeros and ones are exact in every dtype, and so are their sums in fp32.
    detection_masks, truth_masks = ((each != 0).flatten(1).float() for each in (detections, truths))
    common = detection_masks @ truth_masks.T
    return _over_union(_array(common), _array(detection_masks.sum(dim=1)), _array(truth_masks.sum(dim=1)), crowd)


def _over_union(common: Overlaps, detection_areas: Any, truth_areas: Any, crowd: NDArray[np.bool_]) -> Overlaps:
    union = np.where(crowd, detection_areas[:, None], detection_areas[:, None] + truth_areas - common)
    shares: Overlaps = np.divide(common, union, out=np.zeros_like(common), where=union > 0)
    return shares


def _array(values: Tensor) -> NDArray[np.float64]:
    array: NDArray[np.float64] = values.double().cpu().numpy()
    return array
