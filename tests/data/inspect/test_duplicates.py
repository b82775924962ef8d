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

from paceline_data.inspect import findings
from paceline_data.inspect.compare import is_same_picture
from paceline_data.inspect.findings import first_of, near_duplicates
from paceline_data.inspect.look import grey_parts, look_parts


def compared_with_all(parts: NDArray[np.uint8], split_of: NDArray[np.int8], first: NDArray[np.int64]) -> list[set[int]]:
    """For each sample, the nearest eight that correlate and are in an earlier split."""
    centred = parts - parts.mean(axis=1, keepdims=True)
    shown = parts.any(axis=1)
    inverse = np.linalg.inv(np.cov(centred[shown].T) + 25 * np.eye(parts.shape[1]))
    apart = centred[:, None] - centred[None]
    distances = np.einsum("abi,ij,abj->ab", apart, inverse, apart, optimize=True)
    with np.errstate(invalid="ignore"):  # of zeros
        usable = np.corrcoef(parts) >= 0.9
    usable &= shown[:, None] & shown & (split_of[:, None] > split_of) & (first[:, None] != first)
    ranked = np.where(usable, distances, np.inf).argsort(axis=1)[:, :8]
    return [{two for two in ranked[one].tolist() if usable[one, two]} for one in range(len(parts))]


@pytest.mark.parametrize("seed", range(2))
def test_look_alikes_are_those_that_comparing_all_finds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "_QUERIES", 30)
    monkeypatch.setattr(findings, "_KNOWN", 70)
    draws = np.random.default_rng(seed)
    parts = draws.integers(0, 256, (150, 144)).astype(float)
    parts[125:] += 4 * parts[0]  # more images on one background than are compared
    parts[50:125] = parts[draws.integers(0, 50, 75)] + draws.normal(0, 40, (75, 144)) * draws.random((75, 1))
    parts = (255 * (parts - parts.min()) / np.ptp(parts)).astype(np.uint8)
    parts[:5] = 0
    split_of = np.sort(draws.integers(0, 3, 150)).astype(np.int8)
    draws.shuffle(parts)
    first = np.arange(150)
    first[149] = first[75]
    found = [set[int]() for _ in range(150)]
    for one, two in near_duplicates(parts, split_of, first).tolist():
        found[one].add(two)
    assert found == compared_with_all(parts, split_of, first)
    assert 50 < sum(map(len, found)) < 8 * 150


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


def test_what_shows_nothing_has_no_parts() -> None:
    assert not look_parts(np.full((64, 64, 3), 200, dtype=np.uint8)).any()
    assert not look_parts(np.random.default_rng(0).integers(0, 256, (20, 64, 3), dtype=np.uint8)).any()
    assert look_parts(np.random.default_rng(0).integers(0, 256, (32, 64, 3), dtype=np.uint8)).any()


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
