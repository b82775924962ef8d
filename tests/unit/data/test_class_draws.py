"""Draws with replacement: a pure function of (seed, epoch, position), with every class's share exact to one."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.data.class_sampling import ClassDraws, sampled_order, weights_by_class
from paceline.data.order import StepGeometry, epoch_order
from paceline.errors import RecipeError
from paceline.host.world import World

LABELS = np.random.default_rng(0).permutation(np.repeat([0, 1, 2, 4], [200, 61, 10, 3]))
NAMES = ("dog", "cat", "owl", "none", "fox")
BALANCED = ClassDraws(classes=LABELS, weights=weights_by_class("data.sampling", "balanced", LABELS, NAMES))
THIRD = ClassDraws(classes=LABELS, weights=weights_by_class("data.sampling", {"cat": 3, "owl": 0.2}, LABELS, NAMES))


def geometry(draws: ClassDraws | None = BALANCED, repeats: int = 1) -> StepGeometry:
    samples = len(LABELS) * repeats
    return StepGeometry(seed=7, samples=samples, global_batch_size=24, logical_ranks=12, draws=draws, repeats=repeats)


@pytest.mark.parametrize("draws", [BALANCED, THIRD])
@pytest.mark.parametrize("epoch", [0, 1, 17])
def test_shares_are_exact_to_one(draws: ClassDraws, epoch: int) -> None:
    ids = sampled_order(7, epoch, draws) % len(LABELS)
    own = np.array(draws.weights)[LABELS]
    expected = own * len(LABELS) / own.sum()
    assert (np.abs(np.bincount(ids, minlength=len(LABELS)) - expected) < 1).all()
    shares = np.bincount(LABELS, weights=expected, minlength=5)
    assert (np.abs(np.bincount(LABELS[ids], minlength=5) - shares) < 1).all()
    assert len(ids) == len(LABELS)


def test_draws_are_those_of_every_earlier_version() -> None:
    draws = ClassDraws(classes=np.array([0, 0, 0, 0, 0, 1, 1, 2]), weights=(1.0, 2.5, 5.0))
    assert sampled_order(3, 0, draws).tolist() == [7, 15, 23, 6, 1, 2, 5, 13]
    assert sampled_order(3, 1, draws).tolist() == [0, 6, 7, 14, 4, 2, 15, 5]
    assert geometry().epochs == geometry(None).epochs


def test_every_epoch_and_seed_has_draws_of_its_own() -> None:
    orders = {tuple(sampled_order(seed, epoch, BALANCED)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert tuple(epoch_order(7, 0, len(LABELS))) not in orders


@pytest.mark.parametrize("repeats", [1, 2])
def test_any_number_of_processes_takes_the_same_draws(repeats: int) -> None:
    steps = geometry(repeats=repeats)
    for step in (0, 11, 12, 30):
        (alone,) = [np.concatenate([part.ids for part in steps.slices(step, World())])]
        for size in (2, 3, 4):
            parts = [part for rank in range(size) for part in steps.slices(step, World(rank=rank, world_size=size))]
            assert np.array_equal(np.concatenate([part.ids for part in parts]), alone)
    whole = [part for step in range(steps.epochs.first_step(1)) for part in steps.slices(step, World())]
    ids, keys = (np.concatenate([getattr(each, name) for each in whole]) for name in ("ids", "variation_keys"))
    assert len(set(keys.tolist())) == len(keys) == steps.samples
    assert np.array_equal(keys % steps.samples, ids)
    assert np.array_equal(steps.ids_at(0, 0, steps.samples), ids)
    assert np.bincount(ids).max() > 10


def test_without_draws_each_sample_is_its_own_key() -> None:
    (part, *_) = geometry(None).slices(0, World())
    assert part.keys is None
    assert part.variation_keys is part.ids


def test_one_class_in_two_forms_has_one_weight() -> None:
    with pytest.raises(RecipeError, match=r"sampling names 'cafe\\u0301' and 'caf\u00e9', one class in two Unicode"):
        weights_by_class("data.sampling", {"cafe\u0301": 2.0, "caf\u00e9": 3.0}, LABELS, ("caf\u00e9", "cat"))
