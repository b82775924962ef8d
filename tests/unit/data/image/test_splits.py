"""The held-out part is stratified, fixed, and independent of everything but labels and fraction."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.image.dataset import hold_out, stratified_split


@settings(max_examples=100, deadline=None)
@given(labels=st.lists(st.integers(0, 5), max_size=60), fraction=st.floats(0.001, 0.999))
def test_each_class_gives_its_share(labels: list[int], fraction: float) -> None:
    labels_array = np.array(labels, dtype=np.int64)
    train, held_out = stratified_split(labels_array, fraction)
    assert sorted([*train.tolist(), *held_out.tolist()]) == list(range(len(labels)))
    for ids in (train, held_out):
        assert (np.diff(ids) > 0).all()
        assert ids.dtype == np.int64
    for label in set(labels):
        count = labels.count(label)
        wanted = min(max(round(fraction * count), 1), count - 1)
        assert (labels_array[held_out] == label).sum() == wanted


def test_nothing_is_held_out_at_zero() -> None:
    train, held_out = stratified_split(np.array([0, 0, 1]), 0.0)
    assert train.tolist() == [0, 1, 2]
    assert len(held_out) == 0


def test_the_split_is_fixed_for_good() -> None:
    _, held_out = stratified_split(np.repeat(np.arange(3), 10), 0.3)
    assert held_out.tolist() == [2, 6, 9, 12, 18, 19, 21, 22, 27]


def test_a_class_does_not_depend_on_the_others() -> None:
    _, alone = stratified_split(np.zeros(50, dtype=np.int64), 0.2)
    _, together = stratified_split(np.repeat([0, 4], [50, 7]), 0.2)
    assert np.array_equal(together[together < 50], alone)


def test_the_global_generator_is_left_alone() -> None:
    before = np.random.get_state()[1].copy()  # noqa: NPY002 (the global one is what is looked at)
    stratified_split(np.zeros(100_000, dtype=np.int64), 0.5)
    assert np.array_equal(before, np.random.get_state()[1])  # noqa: NPY002


def test_what_is_held_out_of_training_is_another_draw() -> None:
    """Else two runs, one of which splits twice, would hold the same images out for two purposes."""
    labels = np.repeat(np.arange(3), 40)
    left, chosen_by = hold_out(labels, 0.25)
    assert np.bincount(labels[chosen_by]).tolist() == [10, 10, 10]
    assert sorted([*left, *chosen_by]) == list(range(120))
    assert not np.array_equal(chosen_by, stratified_split(labels, 0.25)[1])
    assert np.array_equal(chosen_by, hold_out(labels, 0.25)[1])
