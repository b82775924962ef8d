"""Small image folders on disk, and slices over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.data.batch import Batch
from paceline.data.image.source import FileSource
from paceline.data.slices import SampleSlice


def _make_source(root: Path, sizes: Iterable[tuple[int, int]], suffix: str = "png", channels: int = 3) -> FileSource:
    """Write one noise image per (width, height) and return them as a source; labels count up modulo 3."""
    generator = np.random.default_rng(0)
    names = []
    for number, (width, height) in enumerate(sizes):
        name = f"{number:04d}.{suffix}"
        pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / name)
        names.append(name.encode())
    return FileSource(root, names, np.arange(len(names), dtype=np.int64) % 3, channels)


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
def make_source() -> Callable[..., FileSource]:
    return _make_source


@pytest.fixture
def slices() -> Callable[..., list[SampleSlice]]:
    return _slices


@pytest.fixture
def shuffled() -> Callable[[int, int], list[SampleSlice]]:
    return _shuffled


@pytest.fixture
def same() -> Callable[[Batch, Batch], bool]:
    return _same


@pytest.fixture
def small(tmp_path: Path) -> FileSource:
    """Forty PNG files of 12 x 12."""
    return _make_source(tmp_path, [(12, 12)] * 40)


@pytest.fixture
def mixed(tmp_path: Path) -> FileSource:
    """Twenty-four JPEG files of different sizes, wide, tall and square."""
    return _make_source(tmp_path, [(20 + 3 * k, 60 - 2 * k) for k in range(24)], "jpg")
