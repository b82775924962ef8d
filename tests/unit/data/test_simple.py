"""Batches that a function makes: each sample in its place, on any number of processes."""

from __future__ import annotations

import numpy as np
import torch

from paceline.data.order import StepGeometry
from paceline.data.pipeline import Placement
from paceline.data.simple import SimplePipeline
from paceline.data.slices import SampleSlice
from paceline.world import World


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
