"""Noise images for benchmarks without data: image i is the same in every run and process."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.data.image.dataset import DatasetRequest, Probe, Statistics, StoredImages
from paceline.dataset_registry import dataset

_KEY = 0x6E6F6973
_SIZE = 224


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
        words = np.random.Philox(key=np.array([_KEY, self._first + sample], dtype=np.uint64)).random_raw(
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
    size = _SIZE if data.image_size == "auto" else data.image_size
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
