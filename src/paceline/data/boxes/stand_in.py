"""What stands for pictures with boxes that are not here, where only sizes matter?"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from paceline.data.boxes.objects import BoxDataset, Objects
from paceline.data.image.source import Image

REFERENCE = f"{__name__}:stand_in"
"""What ``data.dataset`` is called then."""
CLASSES, LONG, SHORT, OBJECTS = 80, 640, 480, 7
"""COCO's classes, its usual picture in pixels, and as many objects in each as there are on average."""
SAID = (
    f"data.path is not set: as for COCO, {CLASSES} classes and pictures of {LONG} by {SHORT} pixels, upright or lying, "
    f"with {OBJECTS} objects each are assumed"
)
_TRAIN, _VALIDATION = 117_266, 5_000
_UPRIGHT = 4  # one picture of so many


@dataclass(frozen=True)
class _Blank:
    """Pictures without content, some upright and most lying, with boxes in them."""

    count: int

    def __len__(self) -> int:
        return self.count

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Height and width of each picture, [len, 2]."""
        is_upright = np.arange(self.count)[:, None] % _UPRIGHT == 0
        return np.where(is_upright, (LONG, SHORT), (SHORT, LONG))

    def image(self, sample: int) -> Image:
        """Black, uint8 [H, W, 3]."""
        return np.zeros((*self.sizes[sample], 3), dtype=np.uint8)

    def objects(self, sample: int, *, masks: bool) -> Objects:
        """Each the left upper quarter."""
        height, width = self.sizes[sample]
        return Objects(
            boxes=np.tile(np.array([0.0, 0.0, width / 2, height / 2]), (OBJECTS, 1)),
            labels=np.arange(OBJECTS),
            crowd=np.zeros(OBJECTS, dtype=bool),
            masks=np.zeros((OBJECTS, height, width), dtype=np.uint8) if masks else None,
        )

    def path(self, sample: int) -> str:
        """Its number."""
        return f"stand-in {sample}"


def stand_in() -> BoxDataset:
    """As many pictures as COCO 2017 has, of its usual size."""
    return BoxDataset(
        name="stand-in",
        train=_Blank(_TRAIN),
        validation=_Blank(_VALIDATION),
        classes=tuple(f"class {number}" for number in range(CLASSES)),
        digest="stand-in",
    )
