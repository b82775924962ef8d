"""Synthetic figures on noise: greyscale 32x32 images with any combination of circle, square and triangle.

Image i is the same in every run and process. Each figure has a separate quarter of the image, and appears with
probability one half.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.image.dataset import DatasetRequest, StoredImages
from paceline.data.image.sets.synthetic import open_drawn
from paceline.dataset_registry import dataset
from paceline.errors import setting_error

_KEY = 0x66696775
_SIZE = 32
_FIGURES = ("circle", "square", "triangle")
_SMALLEST, _LARGEST = 4.5, 7.0


def draw_figures(first: int, count: int) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Draw images ``first`` to ``first + count`` (excluded); return uint8 [N, 32, 32, 1], and labels, 0 or 1 [N, 3]."""
    grid = np.arange(_SIZE) + 0.5
    images = np.empty((count, _SIZE, _SIZE, 1), dtype=np.uint8)
    labels = np.empty((count, len(_FIGURES)), dtype=np.float32)
    for index in range(count):
        raw = np.random.Philox(key=np.array([_KEY, first + index], dtype=np.uint64)).random_raw(16 + _SIZE**2 // 8)
        draws = (raw[:16] >> np.uint64(11)).astype(np.float64) * 2.0**-53
        quarters, labels[index] = np.argsort(draws[:4]), draws[4:7] < 0.5
        light = np.zeros((_SIZE, _SIZE))
        for figure in np.flatnonzero(labels[index]):
            across, down, size = draws[7 + 3 * figure : 10 + 3 * figure]
            radius = _SMALLEST + size * (_LARGEST - _SMALLEST)
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
    if not request.several_labels:
        raise setting_error("data.dataset", "figures", "has any number of labels per image: use task=image_multilabel.")
    return open_drawn(request, draw_figures, _FIGURES, "figures")
