"""Small image folders on disk, and slices over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from backend_slices import same, shuffled, slices
from PIL import Image

from paceline.data.image.source import FileSource

__all__ = ["same", "shuffled", "slices"]


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


@pytest.fixture
def make_source() -> Callable[..., FileSource]:
    return _make_source


@pytest.fixture
def small(tmp_path: Path) -> FileSource:
    """Forty PNG files of 12 x 12."""
    return _make_source(tmp_path, [(12, 12)] * 40)


@pytest.fixture
def mixed(tmp_path: Path) -> FileSource:
    """Twenty-four JPEG files of different sizes, wide, tall and square."""
    return _make_source(tmp_path, [(20 + 3 * k, 60 - 2 * k) for k in range(24)], "jpg")
