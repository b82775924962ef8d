"""The order of samples in many files: each once, a window of files at a time, any slice at the slice's cost."""

from __future__ import annotations

import queue
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.order import StepGeometry
from paceline.data.shard_order import ShardOrder, ShardSizes
from paceline.errors import CheckpointError, DataError
from paceline.host.world import World
from paceline.order import BatchOrder

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def shards(sizes: list[int], window: int) -> ShardSizes:
    return ShardSizes(sizes=np.array(sizes), window=window)


@given(SIZES, st.integers(1, 12), st.integers(0, 2**64 - 1), st.integers(0, 1000), st.data())
def test_each_sample_once_and_any_slice_alone(
    sizes: list[int], window: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    order, files = ShardOrder(seed, epoch, shards(sizes, window)), shards(sizes, window)
    ids = order[:]
    assert np.array_equal(np.sort(ids), np.arange(sum(sizes)))
    begin = data.draw(st.integers(0, len(ids)))
    end = data.draw(st.integers(begin, len(ids)))
    assert np.array_equal(order[begin:end], ids[begin:end])
    # Each window reads all samples of its files, and no other file.
    read = [files.locate(int(each))[0] for each in ids]
    at = 0
    for first in range(0, len(sizes), window):
        own = order.shards[first : first + window].tolist()
        count = sum(sizes[each] for each in own)
        assert set(read[at : at + count]) == set(own)
        at += count


def test_samples_of_a_window_are_mixed_and_epochs_and_seeds_differ() -> None:
    files = shards([100] * 40, 8)
    ids = ShardOrder(1, 0, files)[:]
    neighbours = np.array([files.locate(int(each))[0] for each in ids])
    assert 0.05 < np.mean(neighbours[1:] == neighbours[:-1]) < 0.2  # 1 of 8 by chance
    assert len({ShardOrder(seed, epoch, files)[:].tobytes() for seed in range(3) for epoch in range(3)}) == 9


def test_the_order_is_fixed_for_good() -> None:
    """A change of these would change the samples of every run that is resumed by a later version."""
    assert ShardOrder(0, 0, shards([3, 2, 4, 1], 2))[:].tolist() == [5, 2, 8, 7, 6, 0, 1, 9, 4, 3]
    huge = ShardSizes(sizes=np.full(10**5, 10**5), window=16)
    assert ShardOrder(3, 1, huge)[7_777_777_777:7_777_777_780].tolist() == [3346015538, 1297682066, 1009000892]


def test_memory_grows_with_files_not_with_samples() -> None:
    few, many = (ShardSizes(sizes=np.full(1000, count), window=16) for count in (10, 10**7))
    peaks = []
    for files in (few, many):
        tracemalloc.start()
        order = ShardOrder(1, 0, files)
        for step in range(20):
            order[len(order) // 2 + 64 * step : len(order) // 2 + 64 * step + 64]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 2**20


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_batches_do_not_depend_on_ranks(world_size: int) -> None:
    files = shards([7, 13, 5, 11, 9], 2)
    whole = list(BatchOrder(45, 8, seed=4, shards=files))
    parts = [
        list(BatchOrder(45, 8, seed=4, rank=rank, world_size=world_size, shards=files)) for rank in range(world_size)
    ]
    assert [set(one) for one in whole] == [set().union(*each) for each in zip(*parts, strict=True)]


def test_sizes_of_other_data_are_refused() -> None:
    with pytest.raises(DataError, match="samples=44, but the shards have 45: give the same"):
        BatchOrder(44, 8, shards=shards([45], 2))


def test_an_order_is_not_continued_with_other_shards_or_windows() -> None:
    files = shards([7, 13, 5], 2)
    state = BatchOrder(25, 5, shards=files).state_dict()
    BatchOrder(25, 5, shards=shards([7, 13, 5], 2)).load_state_dict(state)
    for other in (None, shards([7, 13, 5], 1), shards([13, 7, 5], 2)):
        with pytest.raises(CheckpointError, match="The order was saved with shards="):
            BatchOrder(25, 5, shards=other).load_state_dict(state)
    whole = BatchOrder(25, 5)
    before = {name: value for name, value in whole.state_dict().items() if name != "shards"}
    whole.load_state_dict(before)  # as saved before there were shards


def test_only_sizes_of_shards_are_taken() -> None:
    wrong: Any = [7, 13, 5]
    with pytest.raises(DataError, match="shards is a list; give the shard_sizes") as refused:
        BatchOrder(25, 5, shards=wrong)
    assert refused.value.key == "shards"


def test_each_next_window_is_fetched_ahead_and_none_after_the_last_epoch() -> None:
    calls: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    files = ShardSizes(sizes=np.full(4, 10), window=2, fetch=calls.put)
    geometry = StepGeometry(seed=1, samples=40, global_batch_size=10, logical_ranks=1, shards=files)
    list(geometry.stream(0, 8, World()))
    orders = [ShardOrder(1, epoch, files).shards.tolist() for epoch in range(2)]
    wanted = [orders[0][2:], orders[1][:2], orders[1][2:]]
    assert sorted(calls.get(timeout=60) for _ in wanted) == sorted(wanted)
    assert calls.empty()


def test_a_saved_order_is_refused_with_other_shards_or_another_window() -> None:
    files = shards([3, 2, 4], 2)
    state = BatchOrder(9, 2, shards=files).state_dict()
    BatchOrder(9, 2, shards=files).load_state_dict(state)
    for other in (shards([3, 2, 4], 1), shards([2, 3, 4], 2), None):
        with pytest.raises(CheckpointError, match="was saved with shards="):
            BatchOrder(9, 2, shards=other).load_state_dict(state)
    with pytest.raises(CheckpointError, match="was saved with shards=None"):
        BatchOrder(9, 2, shards=files).load_state_dict(BatchOrder(9, 2).state_dict())


def test_a_window_may_be_larger_than_any_number_of_files() -> None:
    sizes = [3, 2, 4]
    assert np.array_equal(ShardOrder(0, 0, shards(sizes, 2**70))[:], ShardOrder(0, 0, shards(sizes, 3))[:])
