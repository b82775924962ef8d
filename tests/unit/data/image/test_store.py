"""A batch of shifted and mirrored images is one gather, and to the byte what numpy cuts out."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.data.image.image_store import ImageStore, StoreShape, vary
from paceline.data.image.transforms import Draws, draw
from paceline.recipe.data import Augment

CPU = torch.device("cpu")


def noise(*shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def filled(images: NDArray[np.uint8], augment: Augment | None, *, channels_last: bool, at_once: int = 7) -> ImageStore:
    """A store of images, put there some at a time."""
    count, channels, size, _ = images.shape
    shape = StoreShape.of(augment, count=count, channels=channels, size=size, channels_last=channels_last)
    store = ImageStore(shape, CPU)
    for first in range(0, count, at_once):
        store.put(first, torch.from_numpy(images[first : first + at_once].copy()))
    return store


def cut_out(images: NDArray[np.uint8], augment: Augment, numbers: NDArray[np.int64], draws: Draws) -> torch.Tensor:
    """What numpy makes of it, image by image."""
    size, padding = images.shape[-1], augment.padding
    border = ((0, 0), (padding, padding), (padding, padding))
    mode = "constant" if augment.padding_mode == "zero" else "reflect"
    found = []
    for row, number in enumerate(numbers):
        image = images[number]
        if draws.offsets is not None:
            top, left = draws.offsets[row]
            image = np.pad(image, border, mode=mode)[:, top : top + size, left : left + size]
        found.append(image[..., ::-1] if draws.flip[row] else image)
    return torch.from_numpy(np.stack(found))


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "augment",
    [
        Augment(crop="pad", padding=1, flip=0.5),
        Augment(crop="pad", padding=4, padding_mode="reflect", flip=0.5),
        Augment(crop="pad", padding=8, padding_mode="reflect"),
        Augment(crop="pad", padding=20, flip=1.0),
        Augment(flip=0.5),
        Augment(),
    ],
    ids=lambda a: f"{a.crop}-{a.padding}-{a.padding_mode}-{a.flip}",
)
def test_shift_and_flip_are_numpys(augment: Augment, channels: int, channels_last: bool) -> None:
    images = noise(20, channels, 9, 9)
    store = filled(images, augment, channels_last=channels_last)
    numbers = np.random.default_rng(1).integers(0, 20, 200)
    draws = draw(augment, 3, 1, numbers + 20 * np.arange(200))
    found = store.gather(torch.from_numpy(store.starts(numbers, draws)))
    assert torch.equal(found, cut_out(images, augment, numbers, draws))


@pytest.mark.parametrize("channels_last", [True, False])
def test_every_corner_of_the_first_and_last_image(channels_last: bool) -> None:
    images = noise(3, 3, 8, 8)
    augment = Augment(crop="pad", padding=2, flip=0.5)
    store = filled(images, augment, channels_last=channels_last)
    corners = np.array(list(itertools.product((0, 2), range(5), range(5), (0, 1))))
    draws = Draws(corners[:, 3].astype(bool), corners[:, 1:3], None)
    found = store.gather(torch.from_numpy(store.starts(corners[:, 0], draws)))
    assert torch.equal(found, cut_out(images, augment, corners[:, 0], draws))


def test_images_that_are_not_varied_are_what_was_put_there() -> None:
    images = noise(5, 3, 6, 6)
    for channels_last in (True, False):
        store = filled(images, None, channels_last=channels_last, at_once=2)
        numbers = np.array([4, 0, 4])
        found = store.gather(torch.from_numpy(store.starts(numbers, None)))
        assert torch.equal(found, torch.from_numpy(images[numbers]))
        assert not channels_last or found.is_contiguous(memory_format=torch.channels_last)


def test_a_copy_has_no_gaps_and_the_channels_where_they_were() -> None:
    """So are batches copied to pinned memory."""
    images = noise(5, 3, 6, 6)
    for channels_last in (True, False):
        store = filled(images, Augment(crop="pad", padding=2), channels_last=channels_last)
        found = store.gather(torch.tensor([0, 300, 1]))
        layout = torch.channels_last if channels_last else torch.contiguous_format
        assert not found.is_contiguous(memory_format=layout)
        closed = torch.empty_like(found).copy_(found)
        assert closed.untyped_storage().nbytes() == found.numel()
        assert not channels_last or closed.is_contiguous(memory_format=layout)
        assert torch.equal(closed, found)


def test_a_store_takes_the_room_that_it_says() -> None:
    augment = Augment(crop="pad", padding=4, flip=0.5)
    for shape in (
        StoreShape.of(augment, count=10, channels=3, size=32),
        StoreShape.of(None, count=10, channels=3, size=32),
    ):
        assert ImageStore(shape, CPU)._memory.nbytes == shape.bytes
    assert StoreShape.of(None, count=10, channels=3, size=32).bytes == 10 * 3072 + 96
    assert StoreShape.of(augment, count=10, channels=3, size=32).bytes == 2 * 10 * 4800 + 120


def test_no_image_is_an_empty_batch() -> None:
    store = filled(noise(2, 3, 8, 8), Augment(crop="pad", flip=0.5), channels_last=True)
    nothing = np.arange(0)
    starts = store.starts(nothing, draw(Augment(crop="pad", flip=0.5), 0, 0, nothing))
    assert store.gather(torch.from_numpy(starts)).shape == (0, 3, 8, 8)


@pytest.mark.parametrize("mode", ["zero", "reflect"])
def test_batches_that_are_not_held_are_varied_alike(mode: str) -> None:
    augment = Augment(crop="pad", padding=3, padding_mode=mode, flip=0.5)
    images = noise(30, 3, 8, 8)
    numbers = np.arange(30)
    draws = draw(augment, 3, 1, numbers)
    found = vary(torch.from_numpy(images.copy()), augment, draws)
    assert found.is_contiguous()
    assert torch.equal(found, cut_out(images, augment, numbers, draws))


@pytest.mark.parametrize(("channels", "channels_last"), [(3, True), (1, False), (1, True)])
def test_an_array_that_lies_as_it_should_is_the_store(channels: int, channels_last: bool) -> None:
    images = noise(5, 6, 6, channels)
    shape = StoreShape.of(Augment(), count=5, channels=channels, size=6, channels_last=channels_last)
    store = ImageStore.over(shape, CPU, images)
    assert store is not None
    numbers = np.array([4, 0, 4, 2])
    seen = store.gather(torch.from_numpy(store.starts(numbers, None)))
    assert torch.equal(seen, torch.from_numpy(images[numbers]).permute(0, 3, 1, 2))
    images[4] = 7
    assert torch.all(store.gather(torch.from_numpy(store.starts(np.array([4]), None))) == 7), "no byte was copied"
    assert not torch.all(seen[0] == 7), "a batch is a copy"


@pytest.mark.parametrize(
    ("augment", "channels_last", "change"),
    [
        (Augment(crop="pad", padding=1), True, None),
        (Augment(flip=0.5), True, None),
        (Augment(), False, None),
        (Augment(), True, lambda images: images[::-1]),
        (Augment(), True, lambda images: images[:, :5]),
        (Augment(), True, lambda images: np.frombuffer(images.tobytes(), np.uint8).reshape(images.shape)),
    ],
    ids=["border", "mirrored", "channels first", "not contiguous", "another size", "not to be written"],
)
def test_an_array_that_lies_otherwise_is_not(augment: Augment, channels_last: bool, change: Any) -> None:
    images = noise(5, 6, 6, 3)
    shape = StoreShape.of(augment, count=5, channels=3, size=6, channels_last=channels_last)
    assert ImageStore.over(shape, CPU, images if change is None else change(images)) is None
