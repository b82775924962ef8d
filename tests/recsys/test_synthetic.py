"""A generated sample is a function of its id alone, and the best possible answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.data.slices import SampleIds
from paceline.errors import RecipeError
from paceline.metrics.multilabel import area_under_curve
from paceline.recipe.data import Clicks, Data
from paceline_recsys.dataset import ClickRows, hold_in_memory
from paceline_recsys.sets.synthetic import SyntheticClicks, open_clicks

SMALL = Clicks(dense_features=3, categories=4, max_rows=200, evaluation_samples=3000)


def made(clicks: Clicks = SMALL, samples: int = 20_000) -> SyntheticClicks:
    source = open_clicks(Data(dataset="synthetic_clicks", samples=samples, recommendation=clicks)).train
    assert isinstance(source, SyntheticClicks)
    return source


def test_samples_depend_on_nothing_but_their_ids() -> None:
    ids = np.array([19_999, 0, 8192, 5])
    source = made()
    whole, some, one = hold_in_memory(source).read(ids), source.read(ids), source.read(ids[2:3])
    for a, b in zip(whole, some, strict=True):
        assert (a == b).all()
    for a, b in zip(some, one, strict=True):
        assert (a[2:3] == b).all()
    assert source.read(np.empty(0, dtype=np.int64)).dense.shape == (0, 3)


def test_splits_are_different() -> None:
    found = open_clicks(Data(dataset="synthetic_clicks", recommendation=SMALL))
    assert (found.train.read(np.arange(50)).dense != found.validation.read(np.arange(50)).dense).any()


def test_categories_have_a_long_tail() -> None:
    rows = made().read(np.arange(20_000))
    assert rows.categories.min() == 0
    for feature, table in enumerate(open_clicks(Data(dataset="synthetic_clicks", recommendation=SMALL)).tables):
        counts = np.bincount(rows.categories[:, feature], minlength=table)
        weights = np.arange(1, table + 1) ** -1.05
        assert len(counts) == table
        assert counts[0] / 20_000 == pytest.approx(weights[0] / weights.sum(), abs=0.015)


def test_nothing_answers_better_than_the_probabilities_that_labels_were_drawn_with() -> None:
    source, ids = made(), np.arange(20_000)
    labels, wanted = source.read(ids).labels.astype(bool), source.probabilities(ids)
    assert labels.mean() == pytest.approx(wanted.mean(), abs=0.01)
    assert 0.1 < labels.mean() < 0.5
    best = area_under_curve(wanted, labels)
    noisy = area_under_curve(wanted + np.random.default_rng(0).normal(0, 0.05, len(ids)), labels)
    assert 0.75 < best < 0.95
    assert noisy < best
    # What is drawn with a probability of about a half comes true about half of the time.
    middle = (wanted > 0.4) & (wanted < 0.6)
    assert labels[middle].mean() == pytest.approx(0.5, abs=0.05)


def test_tables_are_as_many_as_the_features() -> None:
    with pytest.raises(RecipeError, match="has 3 sizes"):
        made(Clicks(categories=4, tables=(5, 5, 5)))
    assert made(Clicks(categories=3, tables=(5, 6, 7))).read(np.arange(1000)).categories.max(axis=0).tolist() == [
        4,
        5,
        6,
    ]


def test_what_is_held_is_read_in_pieces() -> None:
    class Watched(SyntheticClicks):
        most = 0

        def read(self, ids: SampleIds) -> ClickRows:
            self.most = max(self.most, len(ids))
            return super().read(ids)

    source = Watched(SMALL, (50, 60, 70, 80), 70_000, training=True)
    rows, ids = hold_in_memory(source), np.array([0, 65_535, 65_536, 69_999])
    assert 0 < source.most < 70_000
    assert len(rows) == 70_000
    for a, b in zip(rows.read(ids), source.read(ids), strict=True):
        assert a.dtype == b.dtype
        assert (a == b).all()
