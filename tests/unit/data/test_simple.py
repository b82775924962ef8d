"""Batches that a function makes: each sample in its place, on any number of processes."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from paceline.data.batch import Batch
from paceline.data.order import StepGeometry
from paceline.data.pipeline import Placement, SimplePipeline
from paceline.data.slices import SampleSlice
from paceline.host.world import World


def read(part: SampleSlice, training: bool) -> tuple[dict[str, torch.Tensor], list[int]]:
    return {"ids": torch.tensor(part.ids)}, [int(training)] * len(part.ids)


def test_each_sample_is_made_once_wherever_it_is_asked_for() -> None:
    pipeline = SimplePipeline(read, evaluation_samples=7, placement=Placement(device=torch.device("cpu")))
    geometry = StepGeometry(seed=0, samples=10, global_batch_size=4, logical_ranks=2)
    worlds = [World(rank=rank, world_size=2, local_rank=rank, local_world_size=2) for rank in range(2)]
    for of in (
        lambda world: pipeline.train_batches(geometry, 0, 3, world),
        lambda world: pipeline.evaluation_batches(2, world),
    ):
        alone = [batch for batch in of(World()) if not batch.slice.phantom]
        shared = [batch for world in worlds for batch in of(world) if not batch.slice.phantom]
        for batches in (alone, shared):
            assert all(np.array_equal(batch.inputs["ids"], batch.ids) for batch in batches)
        found = sorted(each for batch in alone for each in batch.ids)
        assert found == sorted(each for batch in shared for each in batch.ids) == [*range(len(found))]
    assert pipeline.sample_name(3, training=True) == "sample 3 (training)"


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_make_the_same_batches_in_the_same_order_before_they_are_asked_for(threads: int) -> None:
    made: list[tuple[int, ...]] = []
    ahead = threads * 2
    enough = threading.Semaphore(0)

    def read_slowly(part: SampleSlice, training: bool) -> tuple[torch.Tensor, torch.Tensor]:
        assert threading.current_thread() is not threading.main_thread()
        time.sleep(0.02 if part.logical_rank == 0 else 0)  # so that some overtake others
        made.append(tuple(part.ids))
        enough.release()
        return torch.tensor(part.ids), torch.tensor(part.ids) + 100 * part.epoch

    geometry = StepGeometry(seed=0, samples=40, global_batch_size=4, logical_ranks=2)
    at_hand = Placement(device=torch.device("cpu"))
    expected = [tuple(part.ids) for part in geometry.stream(0, 20, World())]
    pipeline = SimplePipeline(read_slowly, evaluation_samples=7, placement=at_hand, threads=threads, prefetch=2)
    batches = pipeline.train_batches(geometry, 0, 20, World())
    found = [next(batches)]
    for _ in range(1 + ahead):
        assert enough.acquire(timeout=30)
    time.sleep(0.1)
    assert len(made) == 1 + ahead  # and no more than was asked for
    found += batches
    assert [tuple(each.ids) for each in found] == [tuple(each.inputs.tolist()) for each in found] == expected
    assert [each.targets.tolist() for each in found] == [
        [sample + 100 * part.epoch for sample in part.ids] for part in geometry.stream(0, 20, World())
    ]


@pytest.mark.parametrize("threads", [0, 2])
def test_a_stop_iteration_in_what_makes_a_batch_is_no_end(threads: int) -> None:
    """Or an evaluation would score a part of the samples, and say nothing."""

    def read_until_stopped(part: SampleSlice, training: bool) -> tuple[torch.Tensor, torch.Tensor]:
        if 5 in part.ids:
            next(iter(()))
        return torch.tensor(part.ids), torch.tensor(part.ids)

    at_hand = Placement(device=torch.device("cpu"))
    pipeline = SimplePipeline(read_until_stopped, evaluation_samples=20, placement=at_hand, threads=threads)
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(pipeline.evaluation_batches(2, World()))


def test_what_a_thread_raises_comes_where_its_batch_would() -> None:
    def read_until_broken(part: SampleSlice, training: bool) -> tuple[torch.Tensor, torch.Tensor]:
        if 5 in part.ids:
            raise OSError("cannot read sample 5")
        return torch.tensor(part.ids), torch.tensor(part.ids)

    at_hand = Placement(device=torch.device("cpu"))
    pipeline = SimplePipeline(read_until_broken, evaluation_samples=20, placement=at_hand, threads=2)
    batches = pipeline.evaluation_batches(2, World())
    assert [next(batches).ids.tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(OSError, match="sample 5") as caught:
        next(batches)
    assert caught.value.__notes__ == ["(while a batch of these held-out samples was made: 4, 5)"]


def test_a_stream_that_is_left_leaves_no_thread() -> None:
    at_hand = Placement(device=torch.device("cpu"))
    batches = SimplePipeline(read, evaluation_samples=20, placement=at_hand, threads=2).evaluation_batches(2, World())
    next(batches)
    assert any(each.name.startswith("reader") for each in threading.enumerate())
    del batches
    assert not any(each.name.startswith("reader") for each in threading.enumerate())


def test_what_cannot_be_page_locked_stays_where_it_is() -> None:
    """A task may hold a small set on the device, or give sparse tensors."""
    held = {"there": torch.empty(2, 3, device="meta"), "sparse": torch.eye(2).to_sparse()}
    part = next(iter(StepGeometry(seed=0, samples=2, global_batch_size=2, logical_ranks=1).stream(0, 1, World())))
    pinned = Batch(held, [1, 2], part.ids, part).pin_memory().inputs
    assert pinned["there"] is held["there"]
    assert pinned["sparse"] is held["sparse"]
