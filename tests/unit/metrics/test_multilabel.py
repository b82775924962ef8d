"""Average precision and F1 of several labels are scikit-learn's, however the samples are shared out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, f1_score

from paceline.metrics.multilabel import LabelScores

CLASSES = ("a", "b", "c", "never")
THRESHOLDS = (0.5, 0.2, 0.8, 0.5)


def scored(scores: NDArray[Any], labels: NDArray[Any], shares: list[NDArray[Any]]) -> tuple[dict[str, float], Any]:
    """What comes of scores [N, classes], of which each process has a share."""
    parts = []
    for share in shares:
        collector = LabelScores(CLASSES, THRESHOLDS)
        for batch in np.array_split(share, 3) if len(share) else ():
            values = {"logit": torch.from_numpy(scores[batch]), "label": torch.from_numpy(labels[batch])}
            collector.add(values, batch)
        parts.append(collector.part())
    whole = LabelScores(CLASSES, THRESHOLDS)
    return whole.results(parts), whole.details(parts)["label_scores"]


def drawn(count: int = 300) -> tuple[NDArray[Any], NDArray[Any]]:
    """Scores with many ties, and labels that follow them; no sample has the last."""
    draws = np.random.default_rng(1)
    scores = draws.normal(size=(count, 4)).round(1).astype(np.float32)
    labels = (scores + draws.normal(size=scores.shape) > 0.8).astype(np.float32)
    labels[:, 3] = 0
    return scores, labels


def test_they_are_scikit_learns() -> None:
    scores, labels = drawn()
    found, by_class = scored(scores, labels, [np.arange(300)])
    given = 1 / (1 + np.exp(-scores.astype(np.float64))) > THRESHOLDS
    averages = [average_precision_score(labels[:, at], scores[:, at]) for at in range(3)]
    f1 = f1_score(labels[:, :3], given[:, :3], average=None)
    assert found["map"] == pytest.approx(100 * np.mean(averages), abs=1e-10)
    assert found["macro_f1"] == pytest.approx(100 * np.mean(f1), abs=1e-10)
    assert found["micro_f1"] == pytest.approx(100 * f1_score(labels, given, average="micro"), abs=1e-10)
    told = {each["class"]: each for each in by_class}
    assert [told[name]["average_precision"] for name in "abc"] == pytest.approx(100 * np.array(averages), abs=1e-10)
    assert [told[name]["f1"] for name in "abc"] == pytest.approx(100 * f1, abs=1e-10)
    assert by_class[-1]["class"] == "never"
    assert math.isnan(by_class[-1]["average_precision"])
    assert [each["f1"] for each in by_class[:3]] == sorted(f1 * 100)


def test_the_best_threshold_is_the_best_of_all() -> None:
    scores, labels = drawn()
    probabilities = 1 / (1 + np.exp(-scores.astype(np.float64)))
    for each in scored(scores, labels, [np.arange(300)])[1][:3]:
        at = CLASSES.index(each["class"])
        tried = [f1_score(labels[:, at], probabilities[:, at] > t) for t in np.unique(probabilities[:, at]) - 1e-9]
        best = f1_score(labels[:, at], probabilities[:, at] > each["best_threshold"])
        assert each["best_f1"] == pytest.approx(100 * best, abs=1e-10)
        assert best == pytest.approx(max(tried), abs=1e-12)


@pytest.mark.everyday
def test_neither_order_nor_processes_change_a_bit() -> None:
    scores, labels = drawn()
    mixed = np.random.default_rng(2).permutation(300)
    whole = repr(scored(scores, labels, [np.arange(300)]))
    for shares in ([mixed[:100], mixed[100:]], [mixed[:1], mixed[1:120], mixed[:0], mixed[120:]]):
        assert repr(scored(scores, labels, shares)) == whole


def test_what_has_no_value_is_no_number() -> None:
    scores, labels = drawn()
    assert all(map(math.isnan, scored(scores, np.zeros_like(labels), [np.arange(300)])[0].values()))
    scores[7, 1] = math.nan
    assert math.isnan(scored(scores, labels, [np.arange(300)])[0]["map"])
    for largest in (100, math.inf):
        certain = np.where(labels > 0, largest, -largest).astype(np.float32)
        found, by_class = scored(certain, labels, [np.arange(300)])
        assert found == {"map": 100, "macro_f1": 100, "micro_f1": 100}
        assert [each["best_threshold"] for each in by_class[:3]] == [0.5] * 3
