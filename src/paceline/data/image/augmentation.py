"""Random flips, shifts and crops of training images: random draws keyed by (seed, epoch, sample), and their geometry.

Every back-end uses these draws, so a sample is augmented the same way in any batch, worker or rank. The columns of a
sample's row of uniform numbers are fixed:

    0        flip
    1, 2     vertical and horizontal shift
    3        unused
    4 … 43   ten attempts at a random resized crop: area, aspect ratio, top, left
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.data.random_draws import uniforms
from paceline.recipe.data import Augment

Ids = NDArray[np.int64]

ATTEMPTS = 10
_FLIP = 0
_SHIFTS = slice(1, 3)
_FIRST_ATTEMPT = 4
_PER_ATTEMPT = 4


class Box(NamedTuple):
    """A region of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True)
class Draws:
    """Random draws for some samples; rows follow the requested ids.

    Attributes:
        flip: Whether to mirror left and right, bool [N].
        offsets: Top and left corner of the crop within the padded image, in [0, 2·padding], int64 [N, 2];
            None unless the crop is ``pad``.
        attempts: Uniform numbers of the random resized crop, float64 [N, 10, 4]; None for other crops.
    """

    flip: NDArray[np.bool_]
    offsets: Ids | None
    attempts: NDArray[np.float64] | None

    def select(self, chosen: NDArray[np.bool_] | slice) -> Draws:
        """Return the draws for the rows in a slice or boolean mask ``chosen``."""
        return Draws(
            self.flip[chosen],
            None if self.offsets is None else self.offsets[chosen],
            None if self.attempts is None else self.attempts[chosen],
        )


def draw(augment: Augment, seed: int, epoch: int, ids: Ids) -> Draws:
    """Draw each sample's augmentation: a pure function of (seed, epoch, id), whatever else is in ``ids``."""
    resized = augment.crop == "random_resized"
    columns = _FIRST_ATTEMPT + (ATTEMPTS * _PER_ATTEMPT if resized else 0)
    numbers = uniforms(seed, epoch, ids, columns)
    attempts = numbers[:, _FIRST_ATTEMPT:].reshape(len(ids), ATTEMPTS, _PER_ATTEMPT) if resized else None
    offsets = pad_offsets(numbers[:, _SHIFTS], augment.padding) if augment.crop == "pad" else None
    if augment.alternate_flip:
        flip = (uniforms(seed, 0, ids, 1)[:, _FLIP] < augment.flip) ^ (epoch % 2 == 1)
    else:
        flip = numbers[:, _FLIP] < augment.flip
    return Draws(flip, offsets, attempts)


def pad_offsets(numbers: NDArray[np.float64], padding: int) -> Ids:
    """Convert uniform numbers to equally likely crop corners 0 … 2·padding in the padded image."""
    return (numbers * (2 * padding + 1)).astype(np.int64)


def random_resized_box(
    numbers: NDArray[np.float64],
    size: tuple[int, int],
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> Box:
    """Choose a random region of an image (Szegedy et al., "Going deeper with convolutions", 2014).

    The distribution is that of torchvision's RandomResizedCrop: area uniform within ``scale``, aspect ratio log-uniform
    within ``ratio``. After ten attempts that do not fit, the largest central region with an allowed ratio is used.

    Args:
        numbers: Uniform numbers of the sample's attempts, in [0, 1), float64 [10, 4].
        size: Height and width of the image.
        scale: Smallest and largest area, as a share of the image's.
        ratio: Smallest and largest width over height.
    """
    height, width = size
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for area_draw, ratio_draw, top_draw, left_draw in numbers.tolist():
        area = height * width * (scale[0] + (scale[1] - scale[0]) * area_draw)
        aspect = math.exp(low + (high - low) * ratio_draw)
        part_width = round(math.sqrt(area * aspect))
        part_height = round(math.sqrt(area / aspect))
        if 0 < part_width <= width and 0 < part_height <= height:
            top = int(top_draw * (height - part_height + 1))
            return Box(top, int(left_draw * (width - part_width + 1)), part_height, part_width)
    return _central_box(height, width, ratio)


def shrinkage(box: Box, target: int) -> int:
    """Return the factor (1, 2, 4 or 8) by which to decode smaller for a box that is resized to ``target`` pixels.

    The largest factor that leaves the box at least twice the target's size, so that resizing still determines the
    result.
    """
    return next((each for each in (8, 4, 2) if min(box.height, box.width) >= 2 * each * target), 1)


def snapped(box: Box, step: int) -> Box:
    """Round each edge of the box to the nearest multiple of the step; the end of a partial last step counts too."""
    top, left = round(box.top / step), round(box.left / step)
    bottom, right = round((box.top + box.height) / step), round((box.left + box.width) / step)
    return Box(top * step, left * step, (bottom - top) * step, (right - left) * step)


def _central_box(height: int, width: int, ratio: tuple[float, float]) -> Box:
    part_height, part_width = height, width
    if width / height < ratio[0]:
        part_height = max(1, min(height, round(width / ratio[0])))
    elif width / height > ratio[1]:
        part_width = max(1, min(width, round(height * ratio[1])))
    return Box((height - part_height) // 2, (width - part_width) // 2, part_height, part_width)
