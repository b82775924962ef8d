"""Resizing agrees with Pillow, crops are where torchvision puts them, and batched variation is exact."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate

from paceline.data.image.image_store import vary
from paceline.data.image.transforms import Draws, View, draw, evaluation_geometry, evaluation_image, resized_part
from paceline.errors import RecipeError
from paceline.recipe.data import Augment, Progressive


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, dtype=np.uint8)


def smooth(height: int, width: int) -> np.ndarray:
    small = Image.fromarray(noise(max(2, height // 8), max(2, width // 8), 3))
    return np.asarray(small.resize((width, height), Image.Resampling.BICUBIC))


@pytest.mark.parametrize("size", [(375, 500), (500, 375), (300, 256), (64, 48), (256, 256)])
@pytest.mark.parametrize("crop", [0.875, 1.0])
def test_evaluation_is_torchvisions_within_one_level(size: tuple[int, int], crop: float) -> None:
    transforms = pytest.importorskip("torchvision.transforms")
    image = smooth(*size)
    reference = transforms.Compose([transforms.Resize(round(224 / crop)), transforms.CenterCrop(224)])
    theirs = np.asarray(reference(Image.fromarray(image))).astype(int)
    ours = evaluation_image(image, 224, crop)
    assert ours.dtype == torch.uint8
    assert ours.shape == (3, 224, 224)
    assert np.abs(ours.permute(1, 2, 0).numpy() - theirs).max() <= 1


def test_an_image_of_the_right_size_is_not_touched() -> None:
    image = noise(32, 32, 3)
    image.setflags(write=False)
    assert np.array_equal(evaluation_image(image, 32, 0.875).permute(1, 2, 0), image)


def test_a_part_is_resized_as_pillow_does() -> None:
    image = smooth(300, 400)
    theirs = Image.fromarray(image).crop((50, 20, 300, 220)).resize((96, 96), Image.Resampling.BILINEAR)
    ours = resized_part(image[20:220, 50:300], 96).permute(1, 2, 0).numpy()
    assert np.abs(ours - np.asarray(theirs).astype(int)).max() <= 1
    assert np.array_equal(resized_part(image[3:99, 5:101], 96).permute(1, 2, 0), image[3:99, 5:101])


def test_an_empty_batch_stays_empty() -> None:
    augment = Augment(crop="pad", flip=0.5)
    empty = torch.empty(0, 3, 8, 8, dtype=torch.uint8)
    assert vary(empty, augment, draw(augment, 0, 0, np.arange(0))).shape == (0, 3, 8, 8)


def test_flip_leaves_the_others_alone() -> None:
    images = torch.from_numpy(noise(3, 1, 4, 4))
    before = images.clone()
    flipped = vary(images, Augment(flip=0.5), Draws(np.array([True, False, True]), None, None))
    assert torch.equal(flipped[1], before[1])
    assert torch.equal(flipped[0], before[0].flip(-1))
    assert torch.equal(flipped[2], before[2].flip(-1))


def test_reflection_has_a_limit() -> None:
    augment = Augment(crop="pad", padding=8, padding_mode="reflect")
    View(image_size=9, channels=3, augment=augment)
    with pytest.raises(RecipeError, match="padding is 8, but an image of 8 pixels"):
        View(image_size=8, channels=3, augment=augment)


@pytest.mark.parametrize(
    ("epoch", "size"), [(0, 128), (4, 128), (5, 128), (6, 160), (7, 160), (8, 192), (9, 192), (10, 224), (99, 224)]
)
def test_images_grow_from_epoch_to_epoch(epoch: int, size: int) -> None:
    assert Progressive(start_size=128, begin=5, end=10, multiple=32).size_at(epoch, 224) == size
    # As ffcv-imagenet's training script has it: a straight line between the epochs, to the nearest multiple.
    assert size == int(np.round(np.interp([epoch], [5, 10], [128, 224])[0] / 32)) * 32


def test_growing_images_stay_between_their_ends() -> None:
    growing = Progressive(start_size=170, end=20, multiple=32)
    sizes = [growing.size_at(epoch, 250) for epoch in range(25)]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[20]) == (170, 250)


def whole_resized(image: np.ndarray, size: int, crop: float, interpolation: str) -> torch.Tensor:
    """The whole of an image resized, and its centre cut out."""
    scaled, (top, left) = evaluation_geometry(image.shape[:2], (size, size), crop)
    pixels = torch.tensor(image).permute(2, 0, 1)[None].contiguous(memory_format=torch.channels_last)
    resized = interpolate(pixels, size=scaled, mode=interpolation, antialias=True)[0]
    return resized[:, top : top + size, left : left + size]


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(9, 900), (700, 13), (30, 47), (600, 12000), (33, 32)])
def test_an_ordinary_image_is_resized_whole(size: tuple[int, int], interpolation: str) -> None:
    image = noise(*size, 3)
    found = evaluation_image(image, 32, 0.875, interpolation)
    assert torch.equal(found, whole_resized(image, 32, 0.875, interpolation))
    assert found.untyped_storage().nbytes() <= 4 * found.nbytes
    assert found.stride()[0] == 1  # as torch resizes it


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(1, 300), (3, 901), (777, 2)])
def test_of_a_very_long_one_only_the_part_around_the_crop(size: tuple[int, int], interpolation: str) -> None:
    image = smooth(*size)
    expected = whole_resized(image, 224, 0.875, interpolation)
    found = evaluation_image(image, 224, 0.875, interpolation)
    assert found.shape == (3, 224, 224)
    assert int((found.int() - expected.int()).abs().max()) <= 2


def test_it_takes_no_more_memory_than_another() -> None:
    """In a process of its own, as its peak is what is measured."""
    script = """
import resource
import numpy as np
from paceline.data.image.transforms import evaluation_image

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

resource.setrlimit(resource.RLIMIT_DATA, (3 << 30, 3 << 30))
evaluation_image(np.zeros((2000, 3000, 3), np.uint8), 224, 0.875)
before = peak()
for size in ((1, 10_000), (10_000, 1), (1, 50_000_000), (7, 100_000)):
    for interpolation in ("bilinear", "bicubic"):
        evaluation_image(np.zeros((*size, 1), np.uint8), 224, 0.875, interpolation)
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True)
    assert int(done.stdout) < 150, "MiB; the longest picture itself takes 48"
