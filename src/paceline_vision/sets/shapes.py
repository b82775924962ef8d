"""Synthetic detection data: the data set `shapes`, and blank pictures for cases where only sizes matter.

A picture of `shapes` shows discs, rectangles and triangles. It is a pure function of its number, which keys Philox for
size, pattern and objects. So nothing is stored, and pixels do not depend on the reading order. An object may hide part
of another, but never most of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from paceline.data.image.source import Image
from paceline.data.random_draws import uniforms
from paceline.plugins.dataset_registry import dataset
from paceline.recipe.data import Data, GeneratedBoxes
from paceline_vision.detection.dataset import BoxDataset, DetectedObjects

CLASSES = ("disc", "rectangle", "triangle")

_KEY = 0x5A9E5  # change it for another data set
_HELD_OUT = 2**32  # held-out pictures are numbered from here
_OF_PICTURE = 12  # random numbers for height, width, number of objects, pattern
_OF_OBJECT = 10  # random numbers for class, centre, size, rotation, colour
_LEAST_SEEN = 0.6  # maximum hidden share of an object's pixels; objects that would hide more are not drawn
_NOISE = 40  # out of 255, minimum contrast
_IN_MEMORY = 2**27  # bytes, limit of a split's cached pictures
_MIN_KEPT = 8  # at least this many of any size, since a picture and its objects are requested separately

Grid = NDArray[np.float64]
Mask = NDArray[np.bool_]
Drawn = tuple[Image, NDArray[np.int64], Mask]


@dataclass(frozen=True)
class ShapeSource:
    """One split of the synthetic pictures.

    Attributes:
        config: The recipe's settings for them.
        first: Number of the first picture.
        count: Number of pictures.
        split: Name of the split.
    """

    config: GeneratedBoxes
    first: int
    count: int
    split: str

    def __len__(self) -> int:
        return self.count

    @cached_property
    def _drawn(self) -> Callable[[int], Drawn]:
        """Draws pictures and caches the most recent ones for the next epoch."""
        largest = self.config.largest_side**2 * (3 + self.config.objects)  # bytes
        return lru_cache(max(_MIN_KEPT, _IN_MEMORY // largest))(partial(_draw, self.config))

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Height and width of each picture, [len, 2]."""
        sides = uniforms(_KEY, 0, self.first + np.arange(self.count), 2)
        span = self.config.largest_side - self.config.smallest_side + 1
        return (self.config.smallest_side + np.floor(sides * span)).astype(np.int64)

    def read(self, sample: int) -> Image:
        """Draw the picture, uint8 [H, W, 3]; read-only."""
        return self._drawn(self.first + sample)[0]

    def objects(self, sample: int, *, masks: bool) -> DetectedObjects:
        """Return the drawn objects; boxes enclose their visible pixels."""
        _, labels, masks_visible = self._drawn(self.first + sample)
        return DetectedObjects(
            boxes=np.array([_box(each) for each in masks_visible]).reshape(-1, 4),
            labels=labels,
            crowd=np.zeros(len(labels), dtype=bool),
            masks=masks_visible.astype(np.uint8) if masks else None,
        )

    def path(self, sample: int) -> str:
        """Return the split and the number."""
        return f"shapes {self.split}[{sample}]"


@dataset("shapes", kind="boxes", keys=("detection",))
def shapes(data: Data) -> BoxDataset:
    """Open the synthetic data set with the recipe's settings."""
    return open_shapes(data.detection.generated)


def open_shapes(config: GeneratedBoxes) -> BoxDataset:
    """Open the synthetic data set."""
    return BoxDataset(
        name="shapes",
        train=ShapeSource(config, 0, config.samples, "train"),
        validation=ShapeSource(config, _HELD_OUT, config.evaluation_samples, "validation"),
        classes=CLASSES,
        digest=f"shapes 1 {config.smallest_side} {config.largest_side} {config.objects}",
    )


def _draw(config: GeneratedBoxes, number: int) -> Drawn:
    """Draw a picture; return it with the classes and visible pixels of its objects, bool [M, H, W]."""
    draws = uniforms(_KEY, 0, np.array([number]), _OF_PICTURE + config.objects * _OF_OBJECT)[0]
    span = config.largest_side - config.smallest_side + 1
    height, width = (int(config.smallest_side + each * span) for each in draws[:2])
    canvas = _pattern(height, width, draws[3:_OF_PICTURE])
    labels: list[int] = []
    pixels: list[int] = []
    visible = np.zeros((0, height, width), dtype=bool)
    for index in range(1 + int(draws[2] * config.objects)):
        object_draws = draws[_OF_PICTURE + index * _OF_OBJECT :][:_OF_OBJECT]
        inside = _inside(object_draws, height, width)
        left = visible & ~inside
        if (left.sum(axis=(1, 2)) < _LEAST_SEEN * np.array(pixels)).any():
            continue
        labels.append(int(object_draws[0] * len(CLASSES)))
        pixels.append(int(inside.sum()))
        visible = np.concatenate([left, inside[None]])
        canvas[inside] = 255 * object_draws[7:10]
    noise = np.random.Philox(key=[_KEY, number]).random_raw(-(-canvas.size // 8)).view(np.uint8)[: canvas.size]
    canvas += (noise.reshape(canvas.shape) / 255.0 - 0.5) * _NOISE
    picture = np.clip(canvas, 0, 255).astype(np.uint8)
    picture.flags.writeable = False
    return picture, np.array(labels, dtype=np.int64), visible


def _pattern(height: int, width: int, draws: Grid) -> Grid:
    """Blend two colours in waves, float64 [H, W, 3]."""
    angle, waves, first, second = 2 * np.pi * draws[0], 1 + 3 * draws[1], draws[2:5], draws[5:8]
    rows, columns = _grid(height, width)
    along = (rows * np.sin(angle) + columns * np.cos(angle)) / max(height, width)
    share = 0.5 + 0.5 * np.sin(2 * np.pi * (waves * along + draws[8]))
    pattern: Grid = 255 * (share[:, :, None] * first + (1 - share[:, :, None]) * second)
    return pattern


def _inside(draws: Grid, height: int, width: int) -> Mask:
    """Return the pixels whose centres are inside an object, bool [H, W]; it lies fully in the picture."""
    kind, side = int(draws[0] * len(CLASSES)), min(height, width)
    half_rows, half_columns = side * (0.1 + 0.15 * draws[3]), side * (0.1 + 0.15 * draws[4])
    if kind == 0:
        half_columns = half_rows
    top = half_rows + draws[1] * (height - 2 * half_rows)
    left = half_columns + draws[2] * (width - 2 * half_columns)
    rows, columns = _grid(height, width)
    down, right = (rows - top) / half_rows, (columns - left) / half_columns
    inside: Mask
    if kind == 0:
        inside = down**2 + right**2 <= 1
    elif kind == 1:
        inside = np.maximum(abs(down), abs(right)) <= 1
    else:
        down = -down if draws[5] < 0.5 else down  # standing on its base or on its tip
        inside = (abs(down) <= 1) & (abs(right) <= (1 + down) / 2)
    return inside


def _grid(height: int, width: int) -> tuple[Grid, Grid]:
    rows, columns = (np.arange(side, dtype=np.float64) + 0.5 for side in (height, width))
    return rows[:, None], columns[None, :]


def _box(mask: Mask) -> tuple[int, int, int, int]:
    """Return the bounding box of a non-empty mask."""
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


_REFERENCE = f"{__name__}:placeholder"
"""Value of ``data.dataset`` in this case."""
COCO_CLASSES, LONG, SHORT, OBJECTS = 80, 640, 480, 7
"""COCO's classes, typical picture size, and average number of objects per picture."""
_NOTICE = (
    f"data.path is not set: as for COCO, {COCO_CLASSES} classes and pictures of {LONG} by {SHORT} pixels, portrait or "
    f"landscape, with {OBJECTS} objects each are assumed"
)
_TRAIN, _VALIDATION = 117_266, 5_000
_UPRIGHT = 4  # one picture in this number


@dataclass(frozen=True)
class _Blank:
    """Blank pictures, some portrait and most landscape, with boxes."""

    count: int

    def __len__(self) -> int:
        return self.count

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Height and width of each picture, [len, 2]."""
        is_upright = np.arange(self.count)[:, None] % _UPRIGHT == 0
        return np.where(is_upright, (LONG, SHORT), (SHORT, LONG))

    def read(self, sample: int) -> Image:
        """Return a black picture, uint8 [H, W, 3]."""
        return np.zeros((*self.sizes[sample], 3), dtype=np.uint8)

    def objects(self, sample: int, *, masks: bool) -> DetectedObjects:
        """Return its objects, each in the upper left quarter."""
        height, width = self.sizes[sample]
        return DetectedObjects(
            boxes=np.tile(np.array([0.0, 0.0, width / 2, height / 2]), (OBJECTS, 1)),
            labels=np.arange(OBJECTS),
            crowd=np.zeros(OBJECTS, dtype=bool),
            masks=np.zeros((OBJECTS, height, width), dtype=np.uint8) if masks else None,
        )

    def path(self, sample: int) -> str:
        """Return its number."""
        return f"stand-in {sample}"


def placeholder(data: Data) -> BoxDataset:
    """Return as many pictures as COCO 2017 has, of its typical size."""
    return BoxDataset(
        name="stand-in",
        train=_Blank(_TRAIN),
        validation=_Blank(_VALIDATION),
        classes=tuple(f"class {number}" for number in range(COCO_CLASSES)),
        digest="stand-in",
    )


def assumed_shapes(data: Data) -> tuple[Data, str]:
    """Return pictures without content in place of a data set whose path is not given, and a sentence that says so."""
    return replace(data, dataset=_REFERENCE), _NOTICE
