"""Data sets of pictures with boxes around their objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.data.image.decode import BrokenImageError
from paceline.data.image.source import Image
from paceline.data.splits import Source


@dataclass(frozen=True, kw_only=True)
class DetectedObjects:
    """The M objects of a picture.

    Attributes:
        boxes: Left, top, right and bottom edge in pixels from the picture's corner, float64 [M, 4].
        labels: Class indices, int64 [M].
        crowd: Crowd flags (COCO's ``iscrowd``), bool [M]. Crowds are not used in training; in evaluation, detections
            inside one are ignored.
        masks: Pixel masks, 0 or 1, uint8 [M, H, W]; None if not requested.
    """

    boxes: NDArray[np.float64]
    labels: NDArray[np.int64]
    crowd: NDArray[np.bool_]
    masks: NDArray[np.uint8] | None = None

    def trainable(self, height: int, width: int) -> DetectedObjects:
        """Return which objects a network can learn from: not crowds, empty boxes or empty masks."""
        boxes = np.clip(self.boxes, 0, np.array([width, height, width, height], dtype=np.float64))
        keep = ~self.crowd & (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
        keep &= True if self.masks is None else self.masks.max(axis=(1, 2)) > 0
        masks = None if self.masks is None else self.masks[keep]
        return DetectedObjects(boxes=boxes[keep], labels=self.labels[keep], crowd=self.crowd[keep], masks=masks)


class BoxSource(Source[Image], Protocol):
    """The pictures of one split, uint8 [H, W, 3]."""

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Height and width of each picture, [len, 2]; available without reading it."""
        ...

    def objects(self, sample: int, *, masks: bool) -> DetectedObjects:
        """Return its objects and, if requested, their masks.

        Raises:
            BrokenImageError: If a mask cannot be drawn.
        """
        ...


def read_fitting(source: BoxSource, sample: int) -> Image:
    """Return a picture, uint8 [H, W, 3]; raises BrokenImageError, also if it is not as large as its annotations say."""
    image, (height, width) = source.read(sample), source.sizes[sample]
    if image.shape[:2] != (height, width):
        found = f"it has {image.shape[1]}x{image.shape[0]} pixels, its annotations say {width}x{height}"
        raise BrokenImageError(source.path(sample), found)
    return image


@dataclass(frozen=True)
class BoxSubset:
    """A subset of a source.

    Attributes:
        source: The full source.
        chosen: Ids in the source, int64 [len].
    """

    source: BoxSource
    chosen: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.chosen)

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Height and width of each picture, [len, 2]."""
        return self.source.sizes[self.chosen]

    def read(self, sample: int) -> Image:
        """Return the picture, uint8 [H, W, 3]."""
        return self.source.read(int(self.chosen[sample]))

    def objects(self, sample: int, *, masks: bool) -> DetectedObjects:
        """Return its objects."""
        return self.source.objects(int(self.chosen[sample]), masks=masks)

    def path(self, sample: int) -> str:
        """Return its name in the source."""
        return self.source.path(int(self.chosen[sample]))


@dataclass(frozen=True, kw_only=True)
class BoxDataset:
    """Two splits of pictures.

    Attributes:
        name: Name of the data set.
        train: Training pictures.
        validation: Held-out pictures.
        classes: Class names, by index.
        digest: Identifies the data.
        facts: Additional facts for the plan.
        files: Paths of the pictures; empty if they are synthetic.
        left_out: Unused data, one sentence per kind.
        implausible: Those of its sentences that are about implausible annotations.
        is_outlined: Whether each object has an outline, so that masks can be read.
        split: Origin of the held-out pictures, for people; empty if they are synthetic.
        is_split_off: Whether they were split off the training pictures.
        is_unscored: Whether no held-out picture has an object, so that average precision is undefined.
    """

    name: str
    train: BoxSource
    validation: BoxSource
    classes: tuple[str, ...]
    digest: str
    facts: Mapping[str, int] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    implausible: tuple[str, ...] = ()
    is_outlined: bool = True
    split: str = ""
    is_split_off: bool = False
    is_unscored: bool = False
