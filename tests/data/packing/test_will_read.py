"""What a slice is going to read is fetched from the disk at once, before its first image is asked for."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import image_sets
import numpy as np
import pytest

from paceline.data.image.sets.packed import PackedDataset, open_packed
from paceline.data.image.source import SampleSource, SubsetSource, prefetch, repeated
from paceline.data.image.transforms import View
from paceline.data.loaders.pytorch import SliceReader
from paceline.data.slices import SampleIds, SampleSlice

pytest.importorskip("pyarrow")


class Told:
    """A source that writes down what it is told."""

    def __init__(self, base: SampleSource) -> None:
        self.base, self.told, self.labels = base, list[int](), base.labels

    def __len__(self) -> int:
        return len(self.base)

    def read(self, sample: int) -> np.ndarray:
        return self.base.read(sample)

    def path(self, sample: int) -> str:
        return self.base.path(sample)

    def will_read(self, samples: SampleIds) -> None:
        self.told += samples.tolist()


def is_in_memory(packed: PackedDataset, row: int) -> bool:
    """Ask the system whether it remembers the first page of an image; asking it to read would change the answer."""
    begin = int(packed.index.ranges.begin[row])
    shard = packed.manifest.shards[int(packed.index.ranges.file[row])]
    with open(packed.root / shard.name, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as content:
        first = ctypes.c_char.from_buffer(content, begin - begin % mmap.PAGESIZE)
        answer = ctypes.c_ubyte(0)
        failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(first)), 1, ctypes.byref(answer))
        del first
        assert not failed
        return bool(answer.value & 1)


@pytest.fixture
def packed(make_photos: Callable[..., Path], tmp_path: Path) -> PackedDataset:
    root = make_photos(tmp_path / "photos", count=20)
    image_sets.packed(root, tmp_path / "dest", mode="raw", size=256)
    return open_packed(tmp_path / "dest")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is known to tell what is in memory")
def test_the_disk_is_asked_for_all_at_once(packed: PackedDataset) -> None:
    def forget() -> None:
        for shard in packed.manifest.shards:
            with open(packed.root / shard.name, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    forget()
    chosen = np.array([31, 7, 19])
    if any(is_in_memory(packed, int(row)) for row in chosen):
        pytest.skip("this file system keeps everything in memory")
    train = image_sets.opened_set("packed", packed.root, channels=None, validation_fraction=0).train
    prefetch(train, chosen)
    deadline = time.monotonic() + 10
    while not all(is_in_memory(packed, int(row)) for row in chosen) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all(is_in_memory(packed, int(row)) for row in chosen)
    assert not is_in_memory(packed, 3)


def test_who_reads_slices_says_so(packed: PackedDataset) -> None:
    base = Told(image_sets.opened_set("packed", packed.root, channels=None, validation_fraction=0).train)
    source = repeated(SubsetSource(base, np.arange(5, 15)), 2)
    piece = SampleSlice(step=0, epoch=0, logical_rank=0, ids=np.array([3, 13, 0]), step_weight=3)
    batch = SliceReader(source, View(image_size=8, channels=3))[piece]
    assert sorted(base.told) == [5, 8]
    assert batch.inputs.shape == (3, 3, 8, 8)  # type: ignore[union-attr]
