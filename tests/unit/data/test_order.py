"""Whatever the number of processes and micro-batches, a step has the same samples, and an epoch each one once."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.order import StepGeometry, epoch_order, evaluation_rounds, evaluation_slices
from paceline.data.slices import SampleSlice
from paceline.host.world import World

WORLDS = (1, 2, 3, 8)


def worlds(size: int) -> list[World]:
    return [World(rank=rank, world_size=size) for rank in range(size)]


def geometry(samples: int, batch: int, logical_ranks: int, seed: int = 7) -> StepGeometry:
    return StepGeometry(seed=seed, samples=samples, global_batch_size=batch, logical_ranks=logical_ranks)


def used(slices: list[SampleSlice]) -> list[int]:
    """Samples that count, in logical order."""
    real = sorted((each for each in slices if not each.phantom), key=lambda each: each.logical_rank)
    return [sample for each in real for sample in each.ids.tolist()]


def step_of_all(shape: StepGeometry, step: int, world_size: int) -> list[SampleSlice]:
    return [each for world in worlds(world_size) for each in shape.slices(step, world)]


# ---------------------------------------------------------------------------------------- the permutation


@given(st.integers(0, 2**63 - 1), st.integers(0, 1000), st.integers(1, 500))
def test_an_epochs_order_is_a_permutation(seed: int, epoch: int, samples: int) -> None:
    order = epoch_order(seed, epoch, samples)
    assert sorted(order.tolist()) == list(range(samples))
    assert order.dtype == np.int64


def test_orders_differ_by_seed_and_epoch() -> None:
    orders = [tuple(epoch_order(seed, epoch, 100)) for seed in range(5) for epoch in range(5)]
    assert len(set(orders)) == 25


def test_the_order_is_fixed_for_good() -> None:
    """A change of these would change the samples of every run that is resumed by a later version."""
    assert epoch_order(0, 0, 10).tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    assert epoch_order(2**63 - 1, 5, 10).tolist() == [8, 5, 3, 6, 9, 1, 7, 0, 2, 4]


def test_no_place_is_favoured() -> None:
    first = Counter(int(epoch_order(3, epoch, 10)[0]) for epoch in range(2000))
    assert min(first.values()) > 130
    assert max(first.values()) < 270


def test_an_order_cannot_be_changed_by_its_user() -> None:
    with pytest.raises(ValueError, match="read-only"):
        epoch_order(0, 0, 10)[0] = 3


# --------------------------------------------------------------------------------------------- the steps


@pytest.mark.parametrize("samples", [1, 2, 7, 23, 24, 25, 47, 48, 100])
@pytest.mark.parametrize("world_size", WORLDS)
def test_each_sample_once_per_epoch(samples: int, world_size: int) -> None:
    shape = geometry(samples, 24, 24)
    for epoch in (0, 1, 4):
        first = epoch * shape.epochs.first_step(1)
        slices = [
            each
            for step in range(first, first + shape.epochs.first_step(1))
            for each in step_of_all(shape, step, world_size)
        ]
        assert Counter(sample for each in slices for sample in used([each])) == Counter(range(samples))
        assert {each.epoch for each in slices} == {epoch}


@given(
    samples=st.integers(1, 300),
    world_size=st.sampled_from(WORLDS),
    accumulation=st.integers(1, 5),
    micro=st.integers(1, 6),
    step=st.integers(0, 60),
)
def test_a_step_has_the_same_samples_in_every_world(
    samples: int, world_size: int, accumulation: int, micro: int, step: int
) -> None:
    batch = world_size * accumulation * micro
    alone = geometry(samples, batch, 1).slices(step, World())
    apart = step_of_all(geometry(samples, batch, world_size * accumulation), step, world_size)
    assert used(apart) == used(alone)
    # And so has each logical rank.
    shape = geometry(samples, 24 * micro, 24)
    parts = [
        {each.logical_rank: each.ids.tolist() for each in step_of_all(shape, step, size) if not each.phantom}
        for size in WORLDS
    ]
    assert all(one == other for one, other in pairwise(parts))


@given(
    samples=st.integers(1, 200),
    world_size=st.sampled_from(WORLDS),
    accumulation=st.integers(1, 4),
    micro=st.integers(1, 4),
    step=st.integers(0, 60),
)
def test_what_every_rank_is_told(samples: int, world_size: int, accumulation: int, micro: int, step: int) -> None:
    shape = geometry(samples, world_size * accumulation * micro, world_size * accumulation)
    weight = len(used(step_of_all(shape, step, world_size)))
    for world in worlds(world_size):
        slices = shape.slices(step, world)
        assert slices, "a rank without a micro-batch would leave the others waiting"
        assert [each.is_last for each in slices] == [False] * (len(slices) - 1) + [True]
        owned = range(world.rank * accumulation, (world.rank + 1) * accumulation)
        assert all(each.logical_rank in owned for each in slices)
        for each in slices:
            assert (each.step, each.epoch, each.step_weight) == (step, step // shape.epochs.first_step(1), weight)
            assert len(each.ids) >= 1
        phantoms = [each for each in slices if each.phantom]
        assert not phantoms or (len(slices) == 1 and len(phantoms[0].ids) == 1)


@given(samples=st.integers(1, 200), logical=st.integers(1, 16), micro=st.integers(1, 8))
def test_parts_are_as_equal_as_they_can_be(samples: int, logical: int, micro: int) -> None:
    shape = geometry(samples, logical * micro, logical)
    sizes = [len(each.ids) for each in shape.slices(shape.epochs.first_step(1) - 1, World())]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert min(sizes) == shape.smallest_part(shape.epochs.first_step(1))


def test_a_stream_is_its_steps_from_anywhere() -> None:
    shape = geometry(50, 16, 4)
    world = World(rank=1, world_size=2)
    whole = [(each.step, each.logical_rank, each.ids.tolist()) for each in shape.stream(0, 20, world)]
    for first in range(20):
        rest = [(each.step, each.logical_rank, each.ids.tolist()) for each in shape.stream(first, 20, world)]
        assert rest == [each for each in whole if each[0] >= first]


@given(
    samples=st.integers(1, 120),
    world_size=st.sampled_from([1, 2, 4]),
    growth=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9)), max_size=3),
)
def test_a_batch_that_grows_cuts_the_same_order(samples: int, world_size: int, growth: list[tuple[int, int]]) -> None:
    """Steps are slices of the epoch's permutation, one after the other, whatever their sizes."""
    sizes, epoch = [], 0
    for gap, ranks in growth:
        epoch += gap
        sizes.append((epoch, 4 * ranks * 3, 4 * ranks))
    shape = StepGeometry(seed=7, samples=samples, global_batch_size=12, logical_ranks=4, growth=tuple(sizes))
    last = 0
    for epoch in range(6):
        first, last = last, shape.epochs.first_step(epoch + 1)
        steps = [used(step_of_all(shape, step, world_size)) for step in range(first, last)]
        assert [sample for step in steps for sample in step] == epoch_order(7, epoch, samples).tolist()
        size, ranks = next(((size, ranks) for at, size, ranks in reversed(sizes) if at <= epoch), (12, 4))
        assert [len(step) for step in steps[:-1]] == [size] * (len(steps) - 1)
        for step in range(first, last):
            for each in step_of_all(shape, step, world_size):
                assert (each.epoch, each.logical_ranks, each.step_weight) == (epoch, ranks, len(steps[step - first]))
                assert each.logical_rank < ranks
                assert len(each.ids) <= 3


def test_a_batch_larger_than_the_data_is_the_data() -> None:
    shape = geometry(5, 64, 1)
    assert shape.epochs.first_step(1) == 1
    assert sorted(used(shape.slices(3, World()))) == list(range(5))


# ---------------------------------------------------------------------------------------- the evaluation


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("samples", [0, 1, 7, 21, 1000])
@pytest.mark.parametrize("batch", [1, 4, 256])
def test_evaluation_takes_each_sample_once(samples: int, batch: int, world_size: int) -> None:
    slices = [each for world in worlds(world_size) for each in evaluation_slices(samples, batch, world)]
    assert sorted(sample for each in slices for sample in each.ids.tolist()) == list(range(samples))
    assert all(each.step_weight == len(each.ids) <= batch and not each.phantom for each in slices)


@given(samples=st.integers(0, 300), batch=st.integers(1, 64), world_size=st.integers(1, 9))
def test_a_sample_is_scored_in_the_same_company(samples: int, batch: int, world_size: int) -> None:
    alone = {each.logical_rank: each.ids.tolist() for each in evaluation_slices(samples, batch, World())}
    apart = {
        each.logical_rank: each.ids.tolist()
        for world in worlds(world_size)
        for each in evaluation_slices(samples, batch, world)
    }
    assert apart == alone
    counts = [len(list(evaluation_slices(samples, batch, world))) for world in worlds(world_size)]
    assert {evaluation_rounds(samples, batch, world) for world in worlds(world_size)} == {max(counts)}


@given(
    shapes=st.lists(st.sampled_from([(8, 8), (8, 12), (12, 8), (8, 16)]), max_size=120),
    batch=st.integers(1, 16),
    world_size=st.sampled_from([1, 2, 3, 8]),
)
def test_a_batch_has_one_shape_and_a_sample_its_own(shapes: list[tuple[int, int]], batch: int, world_size: int) -> None:
    table = np.array(shapes, dtype=np.int64).reshape(-1, 2)
    alone = list(evaluation_slices(len(shapes), batch, World(), table))
    apart = [each for world in worlds(world_size) for each in evaluation_slices(len(shapes), batch, world, table)]
    assert sorted(sample for each in apart for sample in each.ids.tolist()) == list(range(len(shapes)))
    assert all(shapes[sample] == each.shape for each in apart for sample in each.ids.tolist())
    assert all(0 < len(each.ids) <= batch for each in apart)
    by_number = {each.step: (each.ids.tolist(), each.shape) for each in apart}
    assert by_number == {each.step: (each.ids.tolist(), each.shape) for each in alone}
    # As many batches as there must be: only the last one of a shape is smaller.
    assert len(alone) == sum(-(-shapes.count(shape) // batch) for shape in set(shapes))


@given(st.integers(1, 60), st.integers(2, 5), st.integers(1, 64), st.integers(0, 3))
def test_repeats_stand_side_by_side_and_each_id_comes_once(samples: int, repeats: int, batch: int, epoch: int) -> None:
    order = epoch_order(4, epoch, samples * repeats, repeats)
    assert sorted(order.tolist()) == list(range(samples * repeats))
    images = (order % samples).reshape(samples, repeats)
    assert (images == images[:, :1]).all()
    assert images[:, 0].tolist() == epoch_order(4, epoch, samples).tolist()
    steps = StepGeometry(seed=4, samples=samples * repeats, global_batch_size=batch, logical_ranks=1, repeats=repeats)
    used = [steps.slices(step, World())[0].ids for step in range(steps.epochs.first_step(1))]
    assert sorted(np.concatenate(used).tolist()) == list(range(samples * repeats))


@given(samples=st.integers(1, 200), micro=st.integers(1, 9), each=st.integers(1, 6), world_size=st.integers(1, 8))
def test_processes_in_step_have_as_many_micro_batches(samples: int, micro: int, each: int, world_size: int) -> None:
    shape = geometry(samples, micro * each * world_size, each * world_size)
    in_step = dataclasses.replace(shape, in_step=True)
    for step in range(shape.epochs.phases[0].steps_per_epoch):
        parts = [in_step.slices(step, world) for world in worlds(world_size)]
        assert len({len(mine) for mine in parts}) == 1
        for mine, world in zip(parts, worlds(world_size), strict=True):
            assert [part.is_last for part in mine] == [False] * (len(mine) - 1) + [True]
            real = [part for part in mine if not part.phantom]
            alone = [part for part in shape.slices(step, world) if not part.phantom]
            assert [(part.logical_rank, part.ids.tolist()) for part in real] == [
                (part.logical_rank, part.ids.tolist()) for part in alone
            ]


# ------------------------------------------------------------------------------------- between the epochs


def test_a_long_epochs_order_is_there_before_it_begins() -> None:
    geometry = StepGeometry(seed=99, samples=2**16, global_batch_size=2**14, logical_ranks=1)
    epoch_order.cache_clear()
    stream = geometry.stream(0, 12, World())
    for _ in range(2):
        next(stream)
    deadline = time.monotonic() + 20
    while epoch_order.cache_info().misses < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert epoch_order.cache_info().misses == 2
    while any(thread.name == "epoch order" for thread in threading.enumerate()):
        time.sleep(0.01)
    found = [*stream]
    assert [piece.epoch for piece in found] == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    ids = np.concatenate([piece.ids for piece in found[2:6]])
    assert np.array_equal(ids, epoch_order(99, 1, 2**16))


def test_no_order_is_sorted_that_nobody_uses() -> None:
    """Of short epochs, and beyond a run's end."""
    before = set(threading.enumerate())  # other tests' are not ours
    for samples, steps in ((1000, 8), (2**16, 4)):
        geometry = StepGeometry(seed=98, samples=samples, global_batch_size=samples // 4, logical_ranks=1)
        epoch_order.cache_clear()
        stream = geometry.stream(0, steps, World())
        for _ in range(4):
            next(stream)
        assert not any(thread.name == "epoch order" for thread in set(threading.enumerate()) - before)
        assert epoch_order.cache_info().misses == 1


def test_an_epoch_that_begins_costs_no_sorting() -> None:
    """Of the thread that trains: its processor time, which does not depend on what else the machine does."""
    geometry = StepGeometry(seed=97, samples=1_000_000, global_batch_size=1000, logical_ranks=1)
    stream = geometry.stream(998, 1002, World())
    begun = time.thread_time()
    next(stream)
    sorting = time.thread_time() - begun
    next(stream)
    deadline = time.monotonic() + 60
    while any(thread.name == "epoch order" for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    begun = time.thread_time()
    assert next(stream).epoch == 1
    assert time.thread_time() - begun < 0.1 * sorting


# ---------------------------------------------------------------------------------------- what samples weigh


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_weights_add_up_to_the_whole_steps_on_any_number_of_processes(world_size: int) -> None:
    """Each process knows what all of a step weighs, and parts of it are those of its own samples."""
    weights = np.random.default_rng(3).integers(0, 50, 37)
    plain = geometry(37, 8, 4)
    shape = dataclasses.replace(plain, weights=weights)
    for step in range(2 * shape.epochs.phases[0].steps_per_epoch):
        parts = step_of_all(shape, step, world_size)
        real = [each for each in parts if not each.phantom]
        assert {each.step_weight for each in parts} == {int(weights[used(parts)].sum())}
        assert [each.weight for each in real] == [int(weights[each.ids].sum()) for each in real]
        assert sum(each.weight or 0 for each in real) == real[0].step_weight
        assert {each.step_samples for each in parts} == {len(used(parts))}
        # Which samples a step has, and who takes them, is no matter of weights.
        assert used(parts) == used(step_of_all(plain, step, world_size))
