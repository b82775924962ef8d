"""Samples of unequal length: steps have about as many tokens, parts cost about the same, and each is there once."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.balance import SampleLengths, even_bounds, padded_bounds, partition_costs
from paceline.data.order import StepGeometry
from paceline.data.slices import SampleSlice
from paceline.host.world import World

SOME = st.lists(st.integers(1, 200), min_size=1, max_size=150)


def long_tailed(samples: int, seed: int = 0, most: int = 512) -> SampleLengths:
    drawn = np.random.default_rng(seed).lognormal(np.log(most / 6), 1.0, samples)
    return SampleLengths(tokens=np.clip(drawn, 2, most).astype(np.int64), multiple=8)


def steps_of(lengths: SampleLengths, batch: int, parts: int, *, balanced: bool = True) -> StepGeometry:
    return StepGeometry(
        seed=5,
        samples=len(lengths.tokens),
        global_batch_size=batch,
        logical_ranks=parts,
        lengths=lengths,
        balanced=balanced,
    )


def step_of_all(shape: StepGeometry, step: int, world_size: int) -> list[SampleSlice]:
    return [part for rank in range(world_size) for part in shape.slices(step, World(rank=rank, world_size=world_size))]


def tokens_by_step(shape: StepGeometry, epoch: int = 0) -> list[int]:
    """Of the steps that are whole."""
    assert shape.lengths is not None
    steps = range(
        shape.epochs.first_step(epoch), shape.epochs.first_step(epoch) + shape.samples // shape.global_batch_size
    )
    return [int(shape.lengths.tokens[shape.slices(step, World())[0].ids].sum()) for step in steps]


@pytest.mark.parametrize("balanced", [True, False])
def test_the_largest_micro_batch_of_a_long_run_has_the_longest_sample(balanced: bool) -> None:
    tokens = np.full(4000, 10)
    tokens[7] = 500
    shape = steps_of(SampleLengths(tokens=tokens), 4, 1, balanced=balanced)

    def step_with_it(epoch: int) -> int:
        steps = range(epoch * 1000, epoch * 1000 + 1000)
        return next(step for step in steps if 7 in shape.slices(step, World())[0].ids)

    first, second, third = map(step_with_it, range(3))
    assert first >= 200, "it is not among the first steps"
    largest = shape.costliest(0, 3000)
    assert largest is not None
    assert largest.positions == 4 * 500
    assert largest.step in (first, second)
    after = shape.costliest(first + 1, 3000)
    assert after is not None
    assert after.step in (second, third), "a resumed run meets it in a later epoch"
    before = shape.costliest(0, first)
    assert before is not None
    assert before.positions == 4 * 10, "the run ends before it"


# --------------------------------------------------------------------------------------------------- epochs


@given(tokens=SOME, batch=st.sampled_from([2, 6, 12, 24]), epoch=st.integers(0, 3))
def test_each_sample_once_per_epoch(tokens: list[int], batch: int, epoch: int) -> None:
    shape = steps_of(SampleLengths(tokens=np.array(tokens)), batch, 2)
    first, after = shape.epochs.first_step(epoch), shape.epochs.first_step(epoch + 1)
    parts = [part for step in range(first, after) for part in step_of_all(shape, step, 2) if not part.phantom]
    assert Counter(sample for part in parts for sample in part.ids.tolist()) == Counter(range(len(tokens)))


def test_steps_have_about_the_same_number_of_tokens() -> None:
    lengths = long_tailed(5000)
    dealt = tokens_by_step(steps_of(lengths, 32, 1))
    drawn = tokens_by_step(steps_of(lengths, 32, 1, balanced=False))
    mean = lengths.tokens.mean() * 32
    assert min(dealt) > 0.98 * mean
    assert max(dealt) < 1.02 * mean
    assert min(drawn) < 0.8 * mean, "there is nothing to balance"


def test_epochs_differ_and_repeat_themselves() -> None:
    lengths = long_tailed(640)
    epochs = [
        tuple(np.concatenate([part.ids for part in steps_of(lengths, 32, 1).stream(first, first + 20, World())]))
        for first in (0, 20, 0)
    ]
    assert epochs[0] == epochs[2]
    assert epochs[0] != epochs[1]


def test_no_step_is_the_one_that_has_the_longest_sample() -> None:
    """Dealt without another draw, the first step of each epoch would."""
    shape = steps_of(SampleLengths(tokens=np.arange(1, 81)), 8, 1)
    found = Counter(
        next(step % 10 for step in range(epoch * 10, epoch * 10 + 10) if 79 in shape.slices(step, World())[0].ids)
        for epoch in range(500)
    )
    assert set(found) == set(range(10))
    assert max(found.values()) < 90  # of 50; chance alone gives this once in ten million


def test_a_batch_that_grows_is_balanced_in_each_size() -> None:
    lengths = long_tailed(4096)
    shape = StepGeometry(
        seed=1, samples=4096, global_batch_size=32, logical_ranks=2, growth=((1, 64, 4),), lengths=lengths
    )
    step = shape.epochs.first_step(1) + 3
    found = sum(int(lengths.tokens[part.ids].sum()) for part in shape.slices(step, World()))
    assert found == pytest.approx(64 * lengths.tokens.mean(), rel=0.02)


def test_repeated_samples_stay_together() -> None:
    shape = StepGeometry(
        seed=1, samples=80, global_batch_size=8, logical_ranks=1, repeats=2, lengths=SampleLengths(tokens=np.arange(80))
    )
    assert sorted(Counter((shape.slices(0, World())[0].ids % 40).tolist()).values()) == [2, 2, 2, 2]


# ---------------------------------------------------------------------------------------------------- steps


@given(tokens=SOME, step=st.integers(0, 40), each=st.sampled_from([1, 2, 4]))
def test_a_logical_rank_has_the_same_samples_in_every_world(tokens: list[int], step: int, each: int) -> None:
    shape = steps_of(SampleLengths(tokens=np.array(tokens), multiple=4), 12 * each, 12)
    found = [
        {part.logical_rank: part.ids.tolist() for part in step_of_all(shape, step, size) if not part.phantom}
        for size in (1, 2, 3, 12)
    ]
    assert all(one == other for one, other in pairwise(found))


@given(tokens=SOME, step=st.integers(0, 40))
def test_what_every_rank_is_told(tokens: list[int], step: int) -> None:
    weights = np.array(tokens)
    shape = StepGeometry(
        seed=3,
        samples=len(tokens),
        global_batch_size=12,
        logical_ranks=6,
        weights=weights,
        lengths=SampleLengths(tokens=weights),
        in_step=True,
    )
    for size in (1, 2, 3, 6):
        ranks = [shape.slices(step, World(rank=rank, world_size=size)) for rank in range(size)]
        real = [part for rank in ranks for part in rank if not part.phantom]
        total = sum(part.weight or 0 for part in real)
        assert {part.step_weight for rank in ranks for part in rank} == {total}
        assert {part.step_samples for rank in ranks for part in rank} == {sum(len(part.ids) for part in real)}
        assert all([part.is_last for part in rank] == [False] * (len(rank) - 1) + [True] for rank in ranks)
        assert len({len(rank) for rank in ranks}) == 1, "fsdp gathers weights in each micro-batch: all need as many"


def test_a_step_is_cut_by_what_its_parts_cost() -> None:
    lengths = long_tailed(2048)
    shape, drawn = steps_of(lengths, 256, 8), steps_of(lengths, 256, 8, balanced=False)
    loads = [shape.load(step, 8) for step in range(8)]
    for load, other in zip(loads, [drawn.load(step, 8) for step in range(8)], strict=True):
        assert load is not None
        assert other is not None
        assert load.busiest * 8 / load.positions < 1.1
        assert load.tokens / load.positions > 0.8
        assert other.tokens / other.positions < 0.5


# ---------------------------------------------------------------------------------------------------- parts


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 12))
def test_parts_are_a_partition_and_none_is_empty(lengths: list[int], parts: int) -> None:
    bounds = padded_bounds(np.sort(lengths)[::-1], parts)
    assert bounds[0] == 0
    assert bounds[-1] == len(lengths)
    assert len(bounds) == parts + 1
    sizes = [end - begin for begin, end in pairwise(bounds)]
    assert min(sizes) >= (1 if len(lengths) >= parts else 0)
    assert sizes == sorted(sizes, reverse=True) or len(lengths) >= parts, "empty parts come last"


@given(st.lists(st.integers(1, 9), min_size=4, max_size=8), st.integers(2, 4))
def test_no_other_cut_costs_less(lengths: list[int], parts: int) -> None:
    descending = np.sort(lengths)[::-1]

    def cost(bounds: tuple[int, ...]) -> int:
        return max((end - begin) * int(descending[begin]) for begin, end in pairwise(bounds))

    inner = product(range(1, len(lengths)), repeat=parts - 1)
    others = [(0, *cut, len(lengths)) for cut in inner if all(a < b for a, b in pairwise((0, *cut)))]
    assert cost(padded_bounds(descending, parts)) == min(map(cost, others))


def test_processes_cost_about_the_same_where_parts_cannot() -> None:
    """Single samples for parts: in the order of their lengths, the first process would have all long ones."""
    shape = steps_of(long_tailed(2048), 32, 32)
    for processes in (2, 4, 8):
        loads = [load for step in range(60) if (load := shape.load(step, processes)) is not None]
        busiest = sum(load.busiest for load in loads)
        assert busiest * processes / sum(load.positions for load in loads) < (1.35 if processes == 8 else 1.1)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 24))
def test_sharing_out_is_an_order_of_the_parts(lengths: list[int], parts: int) -> None:
    descending = np.sort(lengths)[::-1]
    places, bounds = partition_costs(descending, parts)
    assert sorted(places.tolist()) == list(range(len(lengths)))
    cut = padded_bounds(descending, parts)
    found = [tuple(places[begin:end].tolist()) for begin, end in pairwise(bounds)]
    assert sorted(found) == sorted(tuple(range(begin, end)) for begin, end in pairwise(cut))
    filled = [bool(part) for part in found]
    assert filled == sorted(filled, reverse=True), "empty parts come last"


def test_even_parts() -> None:
    assert even_bounds(7, 3) == (0, 3, 5, 7)
    assert even_bounds(1, 3) == (0, 1, 1, 1)


# --------------------------------------------------------------------------------------------------- lengths


def test_what_a_sample_is_padded_to() -> None:
    tokens, ids = np.array([3, 8, 9, 20]), np.array([0, 1, 2, 3])
    assert SampleLengths(tokens=tokens).padded(ids).tolist() == [3, 8, 9, 20]
    assert SampleLengths(tokens=tokens, multiple=8).padded(ids).tolist() == [8, 8, 16, 24]
    assert SampleLengths(tokens=tokens, multiple=8, max_width=20).padded(ids).tolist() == [8, 8, 16, 20]
    assert SampleLengths(tokens=tokens, width=32).padded(ids).tolist() == [32] * 4


def test_the_load_of_a_step_is_counted_by_process() -> None:
    shape = StepGeometry(
        seed=0,
        samples=4,
        global_batch_size=4,
        logical_ranks=4,
        lengths=SampleLengths(tokens=np.array([10, 20, 30, 40]), multiple=16),
    )
    alone, apart = shape.load(0, 1), shape.load(0, 2)
    assert alone is not None
    assert apart is not None
    assert (alone.tokens, alone.positions, alone.busiest) == (100, 48 + 32 + 32 + 16, 128)
    assert (apart.tokens, apart.positions, apart.busiest, apart.processes) == (100, 128, 64, 2)


def test_rows_of_one_width_are_left_in_the_order_that_was_drawn() -> None:
    shape = steps_of(SampleLengths(tokens=long_tailed(100).tokens, width=512), 10, 2)
    plain = StepGeometry(seed=5, samples=100, global_batch_size=10, logical_ranks=2)
    for step in range(12):
        mine, theirs = shape.slices(step, World()), plain.slices(step, World())
        assert [part.ids.tolist() for part in mine] == [part.ids.tolist() for part in theirs]
    load = shape.load(0, 1)
    assert load is not None
    assert load.positions == 5120
