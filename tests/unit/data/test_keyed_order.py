"""The order of very large epochs: a permutation like any other, of which any slice costs its own size only."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data import order as order_module
from paceline.data.keyed_order import KeyedOrder
from paceline.data.order import StepGeometry, epoch_order
from paceline.host.world import World
from paceline.plan.epochs import SORTED_AT_MOST

HUGE = 10**10


def deviation(counts: np.ndarray) -> float:
    """Chi-square of equal chances, in standard deviations of its distribution."""
    expected = counts.sum() / counts.size
    square, freedom = float(((counts - expected) ** 2 / expected).sum()), counts.size - 1
    return (square - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize("key", [(0, 0), (7, 1), (2**64 - 1, 2**32 - 1)])
def test_every_small_size_is_permuted(key: tuple[int, int]) -> None:
    for samples in range(1, 300):
        assert sorted(KeyedOrder(*key, samples)[:].tolist()) == list(range(samples)), samples


@given(st.integers(0, 2**64 - 1), st.integers(0, 1000), st.integers(1, 20_000), st.integers(1, 4))
def test_any_size_is_permuted_and_repeats_are_consecutive(seed: int, epoch: int, different: int, repeats: int) -> None:
    ids = KeyedOrder(seed, epoch, different * repeats, repeats)[:]
    assert np.array_equal(np.sort(ids), np.arange(different * repeats))
    assert np.array_equal(ids[::repeats] % different, KeyedOrder(seed, epoch, different)[:])
    assert np.array_equal(ids % different, np.repeat(ids[::repeats] % different, repeats))


def test_the_order_is_fixed_for_good() -> None:
    """A change of these would change the samples of every run that is resumed by a later version."""
    assert KeyedOrder(0, 0, 10)[:].tolist() == [5, 0, 2, 3, 1, 7, 8, 6, 4, 9]
    assert KeyedOrder(2**63 - 1, 5, SORTED_AT_MOST + 1)[:4].tolist() == [11333439, 4868068, 8661133, 11589149]
    assert KeyedOrder(3, 1, HUGE)[HUGE - 4 : HUGE].tolist() == [9365724239, 8985137168, 202358885, 8141159498]
    assert KeyedOrder(3, 1, HUGE, 2)[5:9].tolist() == [9077905394, 2615926149, 7615926149, 2441275967]


def test_seeds_and_epochs_are_independent() -> None:
    orders = [KeyedOrder(seed, epoch, HUGE)[:1000] for seed in range(4) for epoch in range(4)]
    assert len({each.tobytes() for each in orders}) == 16
    for one, other in pairwise(orders):  # ids that two of them share, or that differ by the same amount
        assert np.intersect1d(one, other).size == 0
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.12


@pytest.mark.parametrize("samples", [5, 10, 37])
def test_no_place_and_no_neighbour_is_favoured(samples: int) -> None:
    orders = np.stack([KeyedOrder(3, epoch, samples)[:] for epoch in range(2000)])
    assert all(deviation(np.bincount(place, minlength=samples)) < 4.5 for place in orders.T)
    steps = np.diff(orders, axis=1) % samples
    assert deviation(np.bincount(steps.ravel(), minlength=samples)[1:]) < 4.5


@pytest.mark.parametrize("samples", [SORTED_AT_MOST + 1, 10**8 + 7, HUGE, 2**40 + 3])
def test_a_slice_of_many_samples_looks_random(samples: int) -> None:
    """Its coarse place, its low bits, the step from one to the next, and pairs of both are equally frequent."""
    ids = KeyedOrder(1, 0, samples)[10_000 : 10_000 + 2**17]
    assert np.unique(ids).size == ids.size
    coarse, low = ids // -(-samples // 256), ids % 256
    for found, kinds in (
        *((coarse, 256), (low, 256), (np.diff(ids) % samples // -(-samples // 256), 256)),
        *((coarse[:-1] * 256 + coarse[1:], 2**16), (low[:-1] * 256 + low[1:], 2**16)),
    ):
        assert abs(deviation(np.bincount(found, minlength=kinds))) < 4.5


@pytest.mark.thorough
def test_the_smallest_epoch_in_use_is_permuted() -> None:
    samples = SORTED_AT_MOST + 1
    order, seen = KeyedOrder(5, 2, samples), np.zeros(samples, dtype=bool)
    for begin in range(0, samples, 2**20):
        seen[order[begin : begin + 2**20]] = True
    assert seen.all()


# -------------------------------------------------------------------------------------------------- in a run


def test_only_larger_epochs_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    small = epoch_order(7, 1, 1000, 2)
    monkeypatch.setattr(order_module, "SORTED_AT_MOST", 999)
    epoch_order.cache_clear()
    assert np.array_equal(epoch_order(7, 1, 999), np.argsort(np.random.Philox(key=[7, 1]).random_raw(999)))
    assert np.array_equal(epoch_order(7, 1, 1000, 2), KeyedOrder(7, 1, 1000, 2)[:])
    assert not np.array_equal(epoch_order(7, 1, 1000, 2), small)
    assert not epoch_order(7, 1, 1000, 2).flags.writeable, "it is cached"
    epoch_order.cache_clear()


@pytest.mark.parametrize("samples", [SORTED_AT_MOST + 100, 10**8, HUGE])
def test_steps_take_consecutive_slices_in_memory_of_a_batch(samples: int) -> None:
    batch, ranks = 4096, 4
    steps = StepGeometry(seed=3, samples=samples, global_batch_size=batch, logical_ranks=ranks)
    last = steps.epochs.first_step(1) - 1
    tracemalloc.start()
    for step in (0, last // 2, last, last + 1):
        alone = np.concatenate([part.ids for part in steps.slices(step, World())])
        epoch, within = steps.epochs.locate(step)
        assert np.array_equal(alone, steps.ids_at(epoch, within * batch, within * batch + len(alone)))
        parts = [part for rank in range(2) for part in steps.slices(step, World(rank=rank, world_size=2))]
        assert np.array_equal(np.concatenate([part.ids for part in parts]), alone)
        assert [part.first for part in parts] == [
            within * batch + sum(len(each.ids) for each in parts[:number]) for number in range(len(parts))
        ]
    resumed = next(steps.stream(last, last + 4, World()))
    assert np.array_equal(resumed.ids, steps.slices(last, World())[0].ids)
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()
    assert steps.epochs.samples_before(last + 1) == samples


def test_an_epoch_of_steps_uses_each_sample_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_module, "SORTED_AT_MOST", 100)
    for repeats, key in ((1, None), (3, None), (1, np.arange(1001) % 7)):
        steps = StepGeometry(
            seed=1, samples=1001 - 1001 % repeats, global_batch_size=96, logical_ranks=8, repeats=repeats, sort_key=key
        )
        parts = [*steps.stream(0, steps.epochs.first_step(1), World())]
        assert np.array_equal(np.sort(np.concatenate([part.ids for part in parts])), np.arange(steps.samples))
        assert all((part.first is None) == (key is not None) for part in parts)
