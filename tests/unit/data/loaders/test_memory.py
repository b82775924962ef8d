"""The memory back-end: exact images, no state, little time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.data.batch import Batch
from paceline.data.image.source import ArraySource, FileSource, SubsetSource
from paceline.data.image.transforms import View, evaluation_image
from paceline.data.loaders.memory import MemoryBackend
from paceline.data.slices import SampleSlice
from paceline.recipe.data import Augment, Progressive

Slices = Callable[..., list[SampleSlice]]
Same = Callable[[Batch, Batch], bool]

PAD_AND_FLIP = Augment(crop="pad", padding=2, flip=0.5)


def view(augment: Augment | None = None, *, image_size: int = 12, seed: int = 7) -> View:
    return View(image_size=image_size, channels=3, augment=augment, seed=seed)


def test_images_come_as_they_are(small: FileSource, slices: Slices) -> None:
    batches = list(MemoryBackend(small, view()).batches(slices([3, 1, 2], [0], [])))
    assert [batch.ids.tolist() for batch in batches] == [[3, 1, 2], [0], []]
    assert batches[0].targets.tolist() == [0, 1, 2]
    assert batches[0].targets.dtype == torch.int64
    assert batches[2].inputs.shape == (0, 3, 12, 12)
    for row, sample in enumerate([3, 1, 2]):
        assert np.array_equal(batches[0].inputs[row].permute(1, 2, 0), small.read(sample))


def test_arrays_are_taken_whole(slices: Slices) -> None:
    images = np.random.default_rng(0).integers(0, 256, (9, 8, 8, 1), dtype=np.uint8)
    images.flags.writeable = False
    source = SubsetSource(ArraySource(images, np.arange(9), "noise"), np.array([8, 2]))
    (batch,) = MemoryBackend(source, View(image_size=8, channels=1)).batches(slices([0, 1]))
    assert np.array_equal(batch.inputs.permute(0, 2, 3, 1), images[[8, 2]])
    assert batch.targets.tolist() == [8, 2]
    (larger,) = MemoryBackend(source, View(image_size=16, channels=1, evaluation_crop=1.0)).batches(slices([0, 1]))
    assert torch.equal(larger.inputs[0], evaluation_image(images[8], 16, 1.0))


@pytest.mark.parametrize("augment", [None, PAD_AND_FLIP, Augment(flip=0.5)], ids=["plain", "pad", "flip"])
def test_how_the_model_wants_them_changes_no_bit(
    small: FileSource, augment: Augment | None, shuffled: Callable[[int, int], list[SampleSlice]], same: Same
) -> None:
    pieces = shuffled(40, 7)
    one, other = (MemoryBackend(small, view(augment), channels_last=last).batches(pieces) for last in (True, False))
    assert all(same(first, second) for first, second in zip(one, other, strict=True))


@pytest.mark.parametrize("last", [False, True], ids=["rows", "channels last"])
def test_images_grow_from_epoch_to_epoch(small: FileSource, slices: Slices, last: bool) -> None:
    growing = replace(view(PAD_AND_FLIP), progressive=Progressive(start_size=6, end=2, multiple=3))
    pieces = [each for epoch in range(4) for each in slices([5, 3, 9], [], [1], epoch=epoch)]
    grown = list(MemoryBackend(small, growing, channels_last=last).batches(pieces))
    assert [batch.inputs.shape[-1] for batch in grown] == [*[6] * 3, *[9] * 3, *[12] * 6]
    full = list(MemoryBackend(small, view(PAD_AND_FLIP)).batches(pieces))
    assert all(torch.equal(one.inputs, other.inputs) for one, other in zip(grown[6:], full[6:], strict=True))
    halved = grown[0].inputs.float()
    # Of every pixel and its neighbours, as Pillow's reducing filter takes them; not every other pixel.
    pictures = [
        Image.fromarray(each.permute(1, 2, 0).numpy()).resize((6, 6), Image.Resampling.BILINEAR)
        for each in full[0].inputs
    ]
    expected = torch.from_numpy(np.stack([np.asarray(each) for each in pictures])).permute(0, 3, 1, 2)
    assert (halved - expected).abs().max() <= 1
    apart = list(MemoryBackend(small, growing, channels_last=last).batches(slices([9], [3], [5])))
    assert torch.equal(torch.cat([batch.inputs for batch in reversed(apart)]), grown[0].inputs), "whatever beside it"


@pytest.mark.parametrize("augment", [PAD_AND_FLIP, Augment(flip=0.5)], ids=["pad", "flip"])
def test_variation_does_not_depend_on_company(small: FileSource, augment: Augment, slices: Slices) -> None:
    backend = MemoryBackend(small, view(augment))
    together = next(iter(backend.batches(slices(range(40), epoch=3)))).inputs
    order = np.random.default_rng(0).permutation(40)
    apart = list(backend.batches(slices(*np.split(order, [1, 4, 4, 30]), epoch=3)))
    assert torch.equal(torch.cat([batch.inputs for batch in apart]), together[torch.from_numpy(order)])
    other_epoch = next(iter(backend.batches(slices(range(40), epoch=4)))).inputs
    other_seed = next(iter(MemoryBackend(small, view(augment, seed=8)).batches(slices(range(40), epoch=3)))).inputs
    assert not torch.equal(other_epoch, together)
    assert not torch.equal(other_seed, together)


def test_slices_are_read_lazily(small: FileSource, slices: Slices) -> None:
    taken = 0

    def endless() -> Iterator[SampleSlice]:
        nonlocal taken
        while True:
            taken += 1
            yield slices([1, 2, 3, 4])[0]

    for augment in (None, PAD_AND_FLIP):
        taken = 0
        stream = MemoryBackend(small, view(augment)).batches(endless())
        assert taken == 0
        next(stream)
        assert taken <= 4096 // 4 + 1


def test_broken_images_are_left_out(small: FileSource, slices: Slices) -> None:
    for sample in (2, 5):
        Path(small.path(sample)).write_bytes(b"nothing")
    whole = MemoryBackend(small, view(PAD_AND_FLIP))
    batch, alone, clean = whole.batches(slices([1, 2, 3, 5, 6], [5], [7]))
    assert batch.ids.tolist() == [1, 3, 6]
    assert batch.targets.tolist() == [1, 0, 0]
    assert batch.inputs.shape == (3, 3, 12, 12)
    assert batch.weight == 3
    assert [sample.id for sample in batch.broken] == [2, 5]
    assert batch.broken[0].path == small.path(2)
    assert "not an image" in batch.broken[0].reason
    assert (len(alone.inputs), alone.weight) == (0, 0)
    assert clean.broken == ()
    assert torch.equal(batch.inputs, next(iter(whole.batches(slices([1, 3, 6])))).inputs)


def test_progress_is_told(small: FileSource) -> None:
    told: list[tuple[int, int]] = []
    MemoryBackend(small, view(), progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (40, 40)


def test_no_random_state_is_used(small: FileSource, slices: Slices) -> None:
    before = torch.get_rng_state(), random.getstate()
    list(MemoryBackend(small, view(PAD_AND_FLIP)).batches(slices(range(40))))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_closed_is_closed(small: FileSource, slices: Slices) -> None:
    backend = MemoryBackend(small, view())
    backend.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(iter(backend.batches(slices([1]))))


def test_a_batch_costs_microseconds(slices: Slices) -> None:
    images = np.zeros((2000, 8, 8, 1), dtype=np.uint8)
    backend = MemoryBackend(ArraySource(images, np.zeros(2000, np.int64), "zeros"), View(image_size=8, channels=1))
    pieces = slices(*np.random.default_rng(0).integers(0, 2000, (1000, 4)))
    indices = [torch.tensor(piece.ids) for piece in pieces]
    tensor = torch.from_numpy(images)
    best = {"backend": 1.0, "bare": 0.0}
    # 0 to 5 µs over the bare indexing, of the processor's time. The bound leaves room for a slow processor, and more
    # tries for a busy one.
    for _ in range(70):
        if best["backend"] - best["bare"] < 60e-6:
            return
        start = time.thread_time()
        for _ in backend.batches(pieces):
            pass
        middle = time.thread_time()
        for index in indices:
            tensor[index]
        end = time.thread_time()
        best["backend"] = min(best["backend"], (middle - start) / len(pieces))
        best["bare"] = min(best["bare"] or 1.0, (end - middle) / len(pieces))
    pytest.fail(f"a batch costs {(best['backend'] - best['bare']) * 1e6:.0f} µs more than bare indexing")
