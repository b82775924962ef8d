"""Loader processes are good citizens: they do not grow over a million entries, and all bring the first batch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.sharedctypes import RawArray
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from paceline.data.batch import Batch
from paceline.data.image.source import FileSource
from paceline.data.image.transforms import View
from paceline.data.loaders.pytorch import PytorchBackend
from paceline.data.order import StepGeometry
from paceline.data.slices import SampleSlice
from paceline.host.world import World
from paceline.recipe.data import Augment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

Shuffled = Callable[[int, int], list[SampleSlice]]
Same = Callable[[Batch, Batch], bool]

ENTRIES = 1_000_000
EPOCHS = 5
STEPS = 8  # of each epoch: 2,048 samples, which lie all over the index


@pytest.fixture
def million(tmp_path: Path) -> FileSource:
    """A million names, of eight small files."""
    for number in range(8):
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.jpg")
    names = (b"./" * (number % 3) + b"%d.jpg" % (number % 8) for number in range(ENTRIES))
    return FileSource(tmp_path, names, np.arange(ENTRIES, dtype=np.int64) % 1000, 3)


def beginnings() -> Iterator[SampleSlice]:
    """The first steps of each epoch."""
    geometry = StepGeometry(seed=0, samples=ENTRIES, global_batch_size=256, logical_ranks=1)
    per_epoch = geometry.epochs.phases[0].steps_per_epoch
    for epoch in range(EPOCHS):
        yield from geometry.stream(epoch * per_epoch, epoch * per_epoch + STEPS, World())


def private_bytes(pid: int) -> int:
    """Memory that a process shares with no other."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) * 1024


def test_loader_processes_do_not_grow(million: FileSource) -> None:
    view = View(image_size=8, channels=3, augment=Augment(crop="random_resized", flip=0.5), seed=1)
    before = children()
    with closing(PytorchBackend(million, view, workers=4)) as backend:
        grown: list[dict[int, int]] = []
        for number, batch in enumerate(backend.batches(beginnings()), start=1):
            assert len(batch.ids) == 256
            if number % STEPS == 0:
                grown.append({pid: private_bytes(pid) for pid in children() - before})
    assert len(grown) == EPOCHS
    assert len(grown[0]) == 4
    # What a process loads and sets up once it has by its second batches.
    for pid, first in grown[1].items():
        assert grown[-1][pid] < 1.15 * first, [each[pid] / first for each in grown]


class Attributed(FileSource):
    """Notes which process read which sample."""

    def __init__(self, base: FileSource) -> None:
        self.__dict__ = dict(base.__dict__)
        self.readers = RawArray("q", len(base))

    def read(self, sample: int) -> NDArray[np.uint8]:
        self.readers[sample] = os.getpid()
        return super().read(sample)


def test_all_loader_processes_bring_the_first_batch(small: FileSource, shuffled: Shuffled, same: Same) -> None:
    source = Attributed(small)
    view = View(image_size=12, channels=3, augment=Augment(crop="pad", padding=2, flip=0.5), seed=1)
    alone, together = (PytorchBackend(source, view, workers=workers) for workers in (0, 4))
    try:
        for pieces in (shuffled(40, 8), shuffled(40, 3), shuffled(40, 8)):
            expected = list(alone.batches(pieces))
            found = list(together.batches(pieces))
            assert all(same(one, other) for one, other in zip(found, expected, strict=True))
            for number, piece in enumerate(pieces):
                readers = {source.readers[sample] for sample in piece.ids.tolist()}
                assert len(readers) == (min(4, len(piece.ids)) if number == 0 else 1)
                assert os.getpid() not in readers
    finally:
        together.close()


def children() -> set[int]:
    found = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return {int(pid) for path in found for pid in path.read_text().split()}
