"""At which shape is an image evaluated, if images keep their aspect ratio?

The shape is a function of the image and the recipe alone, never of the images it shares a batch with: batches are made
of images of one shape. So a sample is scored alike in any batch (fastai's rectangular validation, Howard 2018, which
shapes a batch by its mean ratio, does not promise that).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TypeGuard

import numpy as np

from paceline.data.image.source import MeasuredSource, SampleSource, SubsetSource
from paceline.data.image.transforms import Shape
from paceline.data.slices import SampleShapes
from paceline.errors import RecipeError

# Of width to height or the reverse; longer images lose what is beyond. It bounds what a batch can cost in memory.
LARGEST_RATIO = 2

_MEASURED_AT_ONCE = 64
_READERS = 8  # reading a head is waiting for the disk, mostly


def rectangle(height: int, width: int, *, size: int, multiple: int) -> Shape:
    """The shape that an image of ``height`` x ``width`` is shown at.

    Its shorter side is ``size``, the longer one ``size`` and the nearest whole number of ``multiple`` pixels.
    """
    short, long = sorted((height, width))
    # Rounded in whole numbers, halves up, so that no machine rounds otherwise.
    steps = (2 * size * (long - short) + multiple * short) // (2 * multiple * short)
    longer = size + multiple * min(steps, size * (LARGEST_RATIO - 1) // multiple)
    return (longer, size) if height > width else (size, longer)


def measure(source: SampleSource, *, size: int, multiple: int) -> SampleShapes:
    """The shape of every image of a source, from the heads of its files; int64 [N, 2].

    An image whose head cannot be read counts as square: reading it will say what is wrong with it.

    Raises:
        RecipeError: If the source is one's own and does not tell sizes.
    """
    if not _is_measured(source):
        raise RecipeError(
            "data.evaluation_shape=rectangular needs to know every image's size before it is read, and this data set's "
            "source does not tell: give it a method size(sample) that returns (height, width), or use square."
        )
    shapes = np.full((len(source), 2), size, dtype=np.int64)

    def fill(begin: int) -> None:
        for sample in range(begin, min(begin + _MEASURED_AT_ONCE, len(source))):
            found = source.size(sample)
            if found is not None:
                shapes[sample] = rectangle(*found, size=size, multiple=multiple)

    with ThreadPoolExecutor(_READERS) as pool:
        list(pool.map(fill, range(0, len(source), _MEASURED_AT_ONCE)))
    return shapes


def distinct(shapes: SampleShapes) -> dict[Shape, int]:
    """How many images have each shape."""
    found, counts = np.unique(shapes, axis=0, return_counts=True)
    return {(int(height), int(width)): int(count) for (height, width), count in zip(found, counts, strict=True)}


def common_size(source: SampleSource, *, most: int = 32) -> Shape | None:
    """Height and width that some images of a source share, evenly spaced ones, from the heads of their files.

    Args:
        source: The images.
        most: How many to look at.

    Returns:
        None if they differ, or there is no telling.
    """
    if len(source) == 0 or not _is_measured(source):
        return None
    found = {source.size(int(sample)) for sample in np.linspace(0, len(source) - 1, min(most, len(source)))}
    return found.pop() if len(found) == 1 else None


def _is_measured(source: SampleSource) -> TypeGuard[MeasuredSource]:
    return _is_measured(source.base) if isinstance(source, SubsetSource) else isinstance(source, MeasuredSource)
