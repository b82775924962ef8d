"""Objects in pictures: boxes, classes and masks, and the sources they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.data.image.source import Image


@dataclass(frozen=True, kw_only=True)
class Objects:
    """The M objects of a picture.

    Attributes:
        boxes: Left, top, right and bottom edge in pixels from the picture's corner, float64 [M, 4].
        labels: Class indices, int64 [M].
        crowd: Which of them stand for a crowd (COCO's ``iscrowd``), bool [M]. These are neither learned nor asked for:
            in evaluation, what is found inside one is neither right nor wrong.
        masks: Which pixels are theirs, 0 or 1, uint8 [M, H, W]; None where they were not asked for.
    """

    boxes: NDArray[np.float64]
    labels: NDArray[np.int64]
    crowd: NDArray[np.bool_]
    masks: NDArray[np.uint8] | None = None

    def learnable(self, height: int, width: int) -> Objects:
        """Those that a network can learn from: no crowd, boxes cut at the picture's edge, and none without extent."""
        edges = np.array([width, height, width, height], dtype=np.float64)
        boxes = np.clip(self.boxes, 0, edges)
        keep = ~self.crowd & (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
        masks = None if self.masks is None else self.masks[keep]
        return Objects(boxes=boxes[keep], labels=self.labels[keep], crowd=self.crowd[keep], masks=masks)


class BoxSource(Protocol):
    """The pictures of one split; ids are 0 … len - 1."""

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Height and width of each picture, [len, 2]; known without reading it."""
        ...

    def __len__(self) -> int: ...

    def image(self, sample: int) -> Image:
        """The picture, uint8 [H, W, 3].

        Raises:
            BrokenImageError: If it cannot be read.
        """
        ...

    def objects(self, sample: int, *, masks: bool) -> Objects:
        """What is in it, and where asked for, whose each pixel is.

        Raises:
            BrokenImageError: If a mask cannot be drawn.
        """
        ...

    def path(self, sample: int) -> str:
        """The name under which the sample is reported to the user."""
        ...


@dataclass(frozen=True)
class BoxSubset:
    """Some pictures of a source, as a source.

    Attributes:
        source: Where they are.
        chosen: Their ids there, int64 [len].
    """

    source: BoxSource
    chosen: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Height and width of each, [len, 2]."""
        return self.source.sizes[self.chosen]

    def image(self, sample: int) -> Image:
        """The picture, uint8 [H, W, 3]."""
        return self.source.image(int(self.chosen[sample]))

    def objects(self, sample: int, *, masks: bool) -> Objects:
        """What is in it."""
        return self.source.objects(int(self.chosen[sample]), masks=masks)

    def path(self, sample: int) -> str:
        """Its name in the source."""
        return self.source.path(int(self.chosen[sample]))


@dataclass(frozen=True, kw_only=True)
class BoxDataset:
    """Two splits of pictures.

    Attributes:
        name: The data set's.
        train: Training pictures.
        validation: Held-out pictures.
        classes: The classes' names, by index.
        digest: Says which data they are.
        facts: What else a reader of the plan should know.
        left_out: What is there and not used, a sentence for each kind.
    """

    name: str
    train: BoxSource
    validation: BoxSource
    classes: tuple[str, ...]
    digest: str
    facts: Mapping[str, int] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
