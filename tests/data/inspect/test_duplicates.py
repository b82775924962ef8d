"""Copies are found as comparing all with all finds them, and a picture that was resized still looks the same."""

from __future__ import annotations

import importlib.util
import io
import itertools
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from paceline_data.inspect.compare import is_same_picture
from paceline_data.inspect.findings import MOST_BITS, first_of, near_duplicates
from paceline_data.inspect.look import grey_parts, look_hash


def distance(one: int, other: int) -> int:
    return (int(one) ^ int(other)).bit_count()


def compared_with_all(
    hashes: NDArray[np.uint64], split_of: NDArray[np.int8], first: NDArray[np.int64]
) -> list[list[int]]:
    pairs = []
    for one in range(len(hashes)):
        others = [
            (distance(hashes[one], hashes[two]), two)
            for two in range(len(hashes))
            if hashes[one] and hashes[two] and split_of[two] < split_of[one] and first[one] != first[two]
        ]
        pairs += [[one, two] for bits, two in sorted(others)[:8] if bits <= MOST_BITS]
    return pairs


@pytest.mark.parametrize("seed", range(4))
def test_look_alikes_are_those_that_comparing_all_finds(seed: int) -> None:
    draws = np.random.default_rng(seed)
    hashes = draws.integers(0, 2**64, 300, dtype=np.uint64)
    hashes[:5] = 0
    for one in range(100, 300):  # flips 0 to 8 bits of an earlier one
        bits = draws.choice(64, size=draws.integers(0, 9), replace=False)
        hashes[one] = hashes[draws.integers(0, 100)]
        for bit in bits:
            hashes[one] ^= np.uint64(1 << int(bit))
    split_of = np.sort(draws.integers(0, 3, 300)).astype(np.int8)
    first = np.arange(300)
    first[299] = first[150]
    hashes[200:212] = hashes[0:1] | np.uint64(7)  # more than are compared
    found = near_duplicates(hashes, split_of, first).tolist()
    assert found == compared_with_all(hashes, split_of, first)
    assert len(found) > 50


def test_first_of_names_the_first_with_the_same_content() -> None:
    content = np.array([[1, 2], [1, 3], [1, 2], [0, 0], [0, 0], [1, 3], [1, 2]], dtype=np.uint64)
    present = np.array([True, True, True, False, False, True, True])
    assert first_of(content, present).tolist() == [0, 1, 0, 3, 4, 1, 0]
    assert first_of(content, np.zeros(7, dtype=bool)).tolist() == list(range(7))


def photo(name: str) -> Image.Image:
    package = importlib.util.find_spec("sklearn")  # not imported: that takes seconds
    assert package is not None
    assert package.origin is not None
    return Image.open(Path(package.origin).parent / "datasets" / "images" / name)


def saved(image: Image.Image, quality: int) -> NDArray[np.uint8]:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return np.asarray(Image.open(buffer))


@pytest.mark.parametrize("name", ["china.jpg", "flower.jpg"])
def test_a_photo_keeps_its_hash_when_it_is_resized_and_encoded_anew(name: str) -> None:
    original = photo(name)
    hashed = look_hash(np.asarray(original))
    for size in ((320, 214), (160, 107), (1000, 667)):
        for quality in (40, 75, 95):
            changed = saved(original.resize(size, Image.Resampling.LANCZOS), quality)
            assert distance(look_hash(changed), hashed) <= MOST_BITS
    assert distance(look_hash(np.asarray(original.transpose(Image.Transpose.FLIP_LEFT_RIGHT))), hashed) > 20


def test_what_shows_nothing_has_no_hash() -> None:
    assert look_hash(np.full((64, 64, 3), 200, dtype=np.uint8)) == 0
    assert look_hash(np.random.default_rng(0).integers(0, 256, (20, 64, 3), dtype=np.uint8)) == 0


def cut(name: str, number: int) -> Image.Image:
    """One of several parts of a photo."""
    left, top = 60 * number, 30 * number
    return photo(name).convert("RGB").crop((left, top, left + 240, top + 180))


def vignetted(image: Image.Image, radius: float) -> Image.Image:
    """The picture in the middle of a white page, with a soft edge."""
    down, right = np.mgrid[:168, :224]
    outside = 1 / (1 + np.exp((radius - np.hypot(right / 224 - 0.5, down / 168 - 0.5)) / 0.05))[..., None]
    pixels = np.asarray(image.resize((224, 168)), dtype=np.float64)
    return Image.fromarray((pixels * (1 - outside) + 255 * outside).astype(np.uint8))


def correlation(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> float:
    first, second = (grey_parts(each, 32, 32).reshape(-1) for each in (one, other))
    return float(np.corrcoef(first, second)[0, 1])


@pytest.mark.parametrize("name", ["china.jpg", "flower.jpg"])
@pytest.mark.parametrize("number", range(4))
def test_copies_are_the_same_picture(name: str, number: int) -> None:
    original = vignetted(cut(name, number), 0.3) if number % 2 else cut(name, number)
    width, height = original.size
    copies = {
        "small": saved(original.resize((40, 30), Image.Resampling.LANCZOS), 75),
        "large": saved(original.resize((2 * width, 2 * height), Image.Resampling.BICUBIC), 40),
        "brighter": saved(original.point(lambda value: min(255, value + 20)), 85),
        "cropped": saved(original.crop((3, 2, width - 2, height - 3)), 80),
    }
    assert [kind for kind, each in copies.items() if not is_same_picture(np.asarray(original), each)] == []


@pytest.mark.parametrize("radius", [0.05, 0.1, 0.2])
def test_different_pictures_with_one_vignette_are_not_the_same(radius: float) -> None:
    shown = [vignetted(cut(name, number), radius) for name in ("china.jpg", "flower.jpg") for number in range(4)]
    pairs = [(saved(one, 90), saved(other, 90)) for one, other in itertools.combinations(shown, 2)]
    alike = [pair for pair in pairs if correlation(*pair) >= 0.95]
    assert alike or radius > 0.1
    assert not any(is_same_picture(*pair) for pair in alike)
    assert is_same_picture(saved(shown[0], 90), saved(shown[0].resize((100, 75)), 60))
