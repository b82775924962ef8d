"""The area under the curve is exact, and does not know who scored which samples in which order."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from paceline.metrics.multilabel import RankedScores, area_under_curve, normalized_entropy


def collected(scores: np.ndarray, labels: np.ndarray, owners: np.ndarray, ranks: int) -> dict[str, float]:
    """What comes of the samples when each is scored by its owner, in batches of three."""
    parts = []
    for rank in range(ranks):
        mine = np.flatnonzero(owners == rank)
        ranked = RankedScores()
        for at in range(0, len(mine), 3):
            ids = mine[at : at + 3]
            values = {"logit": torch.from_numpy(scores[ids]), "label": torch.from_numpy(labels[ids]).float()}
            ranked.add(values, ids)
            values["logit"].fill_(math.nan)  # as the next replay of a CUDA graph overwrites what the last one returned
        parts.append(ranked.part())
    return RankedScores().results(parts)


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=60), st.integers(1, 5), st.data())
def test_as_scikit_learn_has_it_whoever_scored_what(
    pairs: list[tuple[int, bool]], ranks: int, data: st.DataObject
) -> None:
    # Few different scores, so that there are ties within and across labels.
    scores = np.array([score / 3 for score, _ in pairs], dtype=np.float32)
    labels = np.array([label for _, label in pairs])
    owners = np.array(data.draw(st.lists(st.integers(0, ranks - 1), min_size=len(pairs), max_size=len(pairs))))
    found = collected(scores, labels, owners, ranks)
    alone = collected(scores[::-1].copy(), labels[::-1].copy(), np.zeros(len(pairs)), 1)
    if labels.all() or not labels.any():
        assert all(math.isnan(each) for each in (*found.values(), *alone.values()))
        return
    assert found == alone  # to the bit
    assert found["auc"] == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    probabilities = 1 / (1 + np.exp(-scores.astype(np.float64)))
    entropy = log_loss(labels, np.full(len(labels), labels.mean()))
    assert found["normalized_entropy"] == pytest.approx(log_loss(labels, probabilities) / entropy, rel=1e-9)


def test_many_samples_overflow_nothing() -> None:
    scores = np.tile(np.array([0.0, 1.0], dtype=np.float32), 200_000)
    labels = np.tile(np.array([False, True]), 200_000)
    assert area_under_curve(scores, labels) == 1.0
    assert area_under_curve(-scores, labels) == 0.0


def test_a_score_that_is_no_number_has_no_place() -> None:
    assert math.isnan(area_under_curve(np.array([1.0, math.nan]), np.array([True, False])))
    assert math.isnan(normalized_entropy(np.array([1.0, math.inf]), np.array([True, True])))
