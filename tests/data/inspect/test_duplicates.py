"""Copies are found as comparing all with all finds them, and a picture that was resized still looks the same."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from paceline_data.inspect.findings import MOST_BITS, first_of, near_duplicates
from paceline_data.inspect.look import look_hash


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
        if others and min(others)[0] <= MOST_BITS:
            pairs.append([one, min(others)[1]])
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
