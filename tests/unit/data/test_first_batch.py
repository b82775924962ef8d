"""The first batch is read by all workers at once, and is the same to the bit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from paceline.data.batch import Batch, BrokenSample
from paceline.data.loaders.pytorch import join_parts, split_slice
from paceline.data.slices import SampleSlice


def piece(step: int, count: int) -> SampleSlice:
    ids = np.arange(count, dtype=np.int64) + 100 * step
    return SampleSlice(
        step=step, epoch=3, logical_rank=2, ids=ids, is_last=False, step_weight=64, logical_ranks=4, shape=(8, 6)
    )


def read(part: SampleSlice) -> Batch:
    """What a worker makes of a slice; samples whose number ends in 3 are broken."""
    whole = part.ids % 10 != 3
    ids = part.ids[whole]
    broken = tuple(BrokenSample(sample, f"{sample}.png", "torn") for sample in part.ids[~whole].tolist())
    inputs = torch.from_numpy(ids.astype(np.uint8)).view(-1, 1, 1, 1).expand(-1, 3, 8, 6)
    return Batch(inputs, torch.from_numpy(ids * 2), ids, part, broken)


@pytest.mark.parametrize("parts", [1, 2, 3, 8, 50])
@pytest.mark.parametrize("count", [0, 1, 2, 13, 40])
def test_parts_put_together_are_the_whole(parts: int, count: int) -> None:
    whole = piece(0, count)
    asked = split_slice(whole, parts)
    batch, expected = join_parts(list(map(read, asked)), whole), read(whole)
    assert batch.slice is whole
    assert torch.equal(batch.inputs, expected.inputs)
    assert torch.equal(batch.targets, expected.targets)
    assert np.array_equal(batch.ids, expected.ids)
    assert batch.broken == expected.broken
    sizes = [len(part.ids) for part in asked]
    assert len(sizes) == max(1, min(parts, count))
    assert max(sizes) - min(sizes) < 2
    for part in asked:
        for field in dataclasses.fields(SampleSlice):
            assert field.name == "ids" or getattr(part, field.name) == getattr(whole, field.name)
