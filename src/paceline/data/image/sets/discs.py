"""Synthetic discs on noise: greyscale 32x32 images with known position and size as regression targets.

Image i is the same in every run and process. The targets are ``x`` and ``y``, the centre in pixels from the upper left
corner, and ``radius``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.image.dataset import DatasetRequest, Statistics, StoredImages, pixel_images
from paceline.data.image.source import ArraySource, with_channels
from paceline.dataset_registry import dataset
from paceline.errors import DataError, did_you_mean

_KEY = 0x64697363
_SIZE = 32
_NUMBERS = ("x", "y", "radius")
_SMALLEST, _LARGEST = 3.0, 8.0


def draw_discs(first: int, count: int) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """Draw discs ``first`` to ``first + count`` (excluded): uint8 [N, 32, 32, 1], and x, y and radius, [N, 3]."""
    grid = np.arange(_SIZE) + 0.5
    images = np.empty((count, _SIZE, _SIZE, 1), dtype=np.uint8)
    numbers = np.empty((count, 3))
    for index in range(count):
        raw = np.random.Philox(key=np.array([_KEY, first + index], dtype=np.uint64)).random_raw(3 + _SIZE**2 // 8)
        across, down, size = (raw[:3] >> np.uint64(11)).astype(np.float64) * 2.0**-53
        x, y = (_LARGEST + each * (_SIZE - 2 * _LARGEST) for each in (across, down))
        radius = _SMALLEST + size * (_LARGEST - _SMALLEST)
        numbers[index] = x, y, radius
        covered = np.clip(radius + 0.5 - np.sqrt((grid - x) ** 2 + (grid[:, None] - y) ** 2), 0, 1)
        noise = raw[3:].view(np.uint8).reshape(_SIZE, _SIZE) // 4
        images[index, :, :, 0] = noise + np.round(192 * covered).astype(np.uint8)
    return images, numbers


@dataset("discs", keys=("samples", "subset", "target_columns"))
def open_discs(request: DatasetRequest) -> StoredImages:
    """Open the discs with the targets that a recipe names, or all three; an additional tenth is held out.

    Raises:
        DataError: If a target does not exist.
    """
    names = request.data.target_columns or _NUMBERS
    if unknown := [name for name in names if name not in _NUMBERS]:
        raise DataError(
            f"data.target_columns names {unknown[0]!r}, but the numbers of a disc are {', '.join(_NUMBERS)}."
            f"{did_you_mean(unknown[0], _NUMBERS)}"
        )

    def draw(first: int, count: int) -> tuple[NDArray[np.uint8], NDArray[Any]]:
        images, numbers = draw_discs(first, count)
        return images, numbers[:, [_NUMBERS.index(name) for name in names]]

    return open_drawn(request, draw, names, "discs")


def open_drawn(
    request: DatasetRequest,
    draw: Callable[[int, int], tuple[NDArray[np.uint8], NDArray[Any]]],
    names: tuple[str, ...],
    title: str,
) -> StoredImages:
    """Open images drawn on noise, by their first number and their count; an additional tenth is held out."""
    samples, channels = request.data.samples, request.channels or 1

    def source(first: int, count: int) -> ArraySource:
        images, targets = draw(first, count)
        return ArraySource(with_channels(images, channels), targets, title)

    splits = [source(0, samples), source(samples, max(1, samples // 10))]
    statistics = Statistics((0.2,) * channels, (0.23,) * channels, f"of the {title}")
    return pixel_images(request, splits, classes=names, statistics=statistics)
