"""Generated images, the same in every run and process: noise for benchmarks, and discs and figures for small tasks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.image.dataset import DatasetRequest, Probe, Statistics, StoredImages, pixel_images
from paceline.data.image.source import ArraySource, with_channels
from paceline.errors import DataError, did_you_mean, setting_error
from paceline.plugins.dataset_registry import dataset

_NOISE_KEY = 0x6E6F6973
_NOISE_SIZE = 224


class SyntheticSource:
    """Uniform noise with labels that cycle through the classes."""

    def __init__(self, count: int, classes: int, shape: tuple[int, int, int], *, first: int = 0) -> None:
        """Take ``count`` images of ``shape`` (height, width, channels); ``first`` separates two splits."""
        self.labels: NDArray[np.int64] = np.arange(count, dtype=np.int64) % classes
        self._shape = shape
        self._first = first

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, sample: int) -> NDArray[np.uint8]:
        """Return image ``sample``, uint8 [H, W, C]."""
        length = int(np.prod(self._shape))
        words = np.random.Philox(key=np.array([_NOISE_KEY, self._first + sample], dtype=np.uint64)).random_raw(
            -(-length // 8)
        )
        image: NDArray[np.uint8] = words.view(np.uint8)[:length].reshape(self._shape)
        return image

    def path(self, sample: int) -> str:
        """Return ``synthetic[sample]``."""
        return f"synthetic[{self._first + sample}]"


@dataset("synthetic", keys=("samples", "classes"))
def open_synthetic(request: DatasetRequest) -> StoredImages:
    """Open noise images of the recipe's size and channels (default: 224 pixels, colour), with a tenth held out."""
    data, channels = request.data, request.channels or 3
    size = _NOISE_SIZE if data.image_size == "auto" else data.image_size
    shape = (size, size, channels)
    held_out = max(1, data.samples // 10)
    return StoredImages(
        train=SyntheticSource(data.samples, data.classes, shape),
        validation=SyntheticSource(held_out, data.classes, shape, first=data.samples),
        classes=tuple(str(index) for index in range(data.classes)),
        digest=f"noise {data.samples} {data.classes} {shape}",
        split="",
        is_split_off=False,
        channels=channels,
        probe=Probe(data.samples, (size, size), greyscale=channels == 1),
        statistics=Statistics((0.5,) * channels, (0.2887,) * channels, "of uniform noise"),
    )


_DISCS_KEY = 0x64697363
_SIZE = 32
_NUMBERS = ("x", "y", "radius")
_MIN_RADIUS, _MAX_RADIUS = 3.0, 8.0


def draw_discs(first: int, count: int) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """Draw discs ``first`` to ``first + count`` (excluded): uint8 [N, 32, 32, 1], and x, y and radius, [N, 3]."""
    grid = np.arange(_SIZE) + 0.5
    images = np.empty((count, _SIZE, _SIZE, 1), dtype=np.uint8)
    numbers = np.empty((count, 3))
    for index in range(count):
        raw = np.random.Philox(key=np.array([_DISCS_KEY, first + index], dtype=np.uint64)).random_raw(3 + _SIZE**2 // 8)
        across, down, size = (raw[:3] >> np.uint64(11)).astype(np.float64) * 2.0**-53
        x, y = (_MAX_RADIUS + each * (_SIZE - 2 * _MAX_RADIUS) for each in (across, down))
        radius = _MIN_RADIUS + size * (_MAX_RADIUS - _MIN_RADIUS)
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
    data, channels = request.data, request.channels or 1
    names = data.target_columns or _NUMBERS
    if unknown := [name for name in names if name not in _NUMBERS]:
        raise DataError(
            f"data.target_columns names {unknown[0]!r}, but the numbers of a disc are {', '.join(_NUMBERS)}."
            f"{did_you_mean(unknown[0], _NUMBERS)}"
        )

    def source(first: int, count: int) -> ArraySource:
        images, numbers = draw_discs(first, count)
        targets: NDArray[Any] = numbers[:, [_NUMBERS.index(name) for name in names]]
        return ArraySource(with_channels(images, channels), targets, "discs")

    splits = [source(0, data.samples), source(data.samples, max(1, data.samples // 10))]
    statistics = Statistics((0.2,) * channels, (0.23,) * channels, "of the discs")
    return pixel_images(request, splits, classes=names, statistics=statistics)


_FIGURES_KEY = 0x66696775
_FIGURES = ("circle", "square", "triangle")
_MIN_REACH, _MAX_REACH = 4.5, 7.0


def draw_figures(first: int, count: int) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Draw images ``first`` to ``first + count`` (excluded); return uint8 [N, 32, 32, 1], and labels, 0 or 1 [N, 3]."""
    grid = np.arange(_SIZE) + 0.5
    images = np.empty((count, _SIZE, _SIZE, 1), dtype=np.uint8)
    labels = np.empty((count, len(_FIGURES)), dtype=np.float32)
    for index in range(count):
        raw = np.random.Philox(key=np.array([_FIGURES_KEY, first + index], dtype=np.uint64)).random_raw(
            16 + _SIZE**2 // 8
        )
        draws = (raw[:16] >> np.uint64(11)).astype(np.float64) * 2.0**-53
        quarters, labels[index] = np.argsort(draws[:4]), draws[4:7] < 0.5
        light = np.zeros((_SIZE, _SIZE))
        for figure in np.flatnonzero(labels[index]):
            across, down, size = draws[7 + 3 * figure : 10 + 3 * figure]
            radius = _MIN_REACH + size * (_MAX_REACH - _MIN_REACH)
            row, column = divmod(int(quarters[figure]), 2)
            margin = _SIZE / 2 - 2 * radius
            x = grid - (column * _SIZE / 2 + radius + across * margin)
            y = grid[:, None] - (row * _SIZE / 2 + radius + down * margin)
            circle, square = np.sqrt(x**2 + y**2), 1.1 * np.maximum(abs(x), abs(y))
            reach = (circle, square, np.maximum(y, 2 * abs(x) - y))[figure]
            light = np.maximum(light, np.clip(radius + 0.5 - reach, 0, 1))
        noise = raw[16:].view(np.uint8).reshape(_SIZE, _SIZE) // 4
        images[index, :, :, 0] = noise + np.round(192 * light).astype(np.uint8)
    return images, labels


@dataset("figures", keys=("samples", "subset"))
def open_figures(request: DatasetRequest) -> StoredImages:
    """Open the figures with a label for each; an additional tenth is held out.

    Raises:
        RecipeError: If the task needs one class per image.
    """
    data, channels = request.data, request.channels or 1
    if not request.several_labels:
        raise setting_error("data.dataset", "figures", "has any number of labels per image: use task=image_multilabel.")

    def source(first: int, count: int) -> ArraySource:
        images, labels = draw_figures(first, count)
        return ArraySource(with_channels(images, channels), labels, "figures")

    splits = [source(0, data.samples), source(data.samples, max(1, data.samples // 10))]
    statistics = Statistics((0.2,) * channels, (0.23,) * channels, "of the figures")
    return pixel_images(request, splits, classes=_FIGURES, statistics=statistics)
