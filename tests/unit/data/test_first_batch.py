"""The first batch is read by all workers at once, and is the same to the bit."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from paceline.data.batch import Batch, BrokenSample
from paceline.data.loaders.pytorch import first_in_parts, joined
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
@pytest.mark.parametrize("count", [1, 2, 13, 40])
def test_parts_put_together_are_the_whole(parts: int, count: int) -> None:
    slices = [piece(0, count), piece(1, 5), piece(2, 1)]
    for batch, whole in zip(joined(map(read, first_in_parts(slices, parts))), slices, strict=True):
        expected = read(whole)
        assert batch.slice is whole
        assert torch.equal(batch.inputs, expected.inputs)
        assert torch.equal(batch.targets, expected.targets)
        assert np.array_equal(batch.ids, expected.ids)
        assert batch.broken == expected.broken


def test_only_the_first_is_split_and_evenly() -> None:
    asked = list(first_in_parts([piece(0, 13), piece(1, 13)], 4))
    assert [len(part.ids) for part in asked] == [4, 3, 3, 3, 13]
    for part in asked[:4]:
        for field in dataclasses.fields(SampleSlice):
            if field.name != "ids":
                assert getattr(part, field.name) == getattr(asked[-1], field.name) or field.name == "step"


def test_no_part_is_empty() -> None:
    assert [len(part.ids) for part in first_in_parts([piece(0, 3)], 8)] == [1, 1, 1]
    assert [len(part.ids) for part in first_in_parts([piece(0, 0)], 8)] == [0]
    assert list(first_in_parts([], 8)) == []


def test_slices_are_asked_for_one_by_one() -> None:
    taken: list[int] = []

    def endless() -> Iterator[SampleSlice]:
        for step in itertools.count():
            taken.append(step)
            yield piece(step, 4)

    asked = first_in_parts(endless(), 2)
    assert taken == []
    next(asked)
    next(asked)
    assert taken == [0]
    next(asked)
    assert taken == [0, 1]
