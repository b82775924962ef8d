"""Slices for tests of data back-ends, and the comparison of their batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest

from paceline.data.batch import Batch
from paceline.data.slices import SampleSlice


def _slices(*batches: Iterable[int], epoch: int = 0) -> list[SampleSlice]:
    """Make one slice per list of ids; the ids are read-only, as those of an epoch's order are."""
    made = []
    for step, ids in enumerate(batches):
        array = np.array(list(ids), dtype=np.int64)
        array.flags.writeable = False
        made.append(SampleSlice(step=step, epoch=epoch, logical_rank=0, ids=array, step_weight=len(array)))
    return made


def _same(first: Batch, second: Batch) -> bool:
    """Say whether two batches have the same bits, ids and broken samples."""
    return (
        first.inputs.dtype == second.inputs.dtype
        and first.inputs.shape == second.inputs.shape
        and bool((first.inputs == second.inputs).all())
        and first.targets.tolist() == second.targets.tolist()
        and first.ids.tolist() == second.ids.tolist()
        and first.slice.step == second.slice.step
        and first.broken == second.broken
    )


def _shuffled(count: int, batch: int) -> list[SampleSlice]:
    """Cut a permutation of all ids into slices."""
    order = np.random.default_rng(1).permutation(count)
    return _slices(*(order[start : start + batch] for start in range(0, count, batch)), epoch=1)


@pytest.fixture
def slices() -> Callable[..., list[SampleSlice]]:
    return _slices


@pytest.fixture
def shuffled() -> Callable[[int, int], list[SampleSlice]]:
    return _shuffled


@pytest.fixture
def same() -> Callable[[Batch, Batch], bool]:
    return _same
