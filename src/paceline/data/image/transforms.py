"""How does one image of any size become what the model sees?

Resizing is bilinear or bicubic with antialiasing on uint8, by torch: within one grey level of Pillow's, at a fifth of
its time. Training and evaluation differ only in the part of the image they keep.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate

from paceline.errors import RecipeError
from paceline.recipe.data import Augment, Progressive

Image = NDArray[np.uint8]
Shape = tuple[int, int]
"""Height and width, in pixels."""

_LARGEST_GROWN = 2**24  # pixels; a picture of 224 pixels may be 256 times as long as it is wide
_FILTER_PIXELS = 3  # on each side of an enlarged part; a bicubic filter reaches 2
_MOST_KEPT = 4  # times the memory of a result


@dataclass(frozen=True, kw_only=True)
class View:
    """How a back-end shows the images of one split.

    Attributes:
        image_size: Height and width of what the model sees, in pixels.
        channels: 1 or 3.
        evaluation_crop: Share of the resized image's side that the centre crop keeps, in (0, 1].
        augment: How training images are varied; None for evaluation.
        seed: The run's seed, which keys the variation.
        mean: Of each channel, in [0, 1]: what is put where an image has nothing.
        interpolation: How images are resized, ``bilinear`` or ``bicubic``.
        progressive: How they grow from epoch to epoch.
    """

    image_size: int
    channels: int
    evaluation_crop: float = 0.875
    augment: Augment | None = None
    seed: int = 0
    mean: tuple[float, ...] = (0.5,)
    interpolation: str = "bilinear"
    progressive: Progressive = field(default_factory=Progressive)

    def size_at(self, epoch: int) -> int:
        """Height and width of an epoch's images."""
        return self.progressive.size_at(epoch, self.image_size)

    def read_size_at(self, epoch: int) -> int:
        """Height and width at which an epoch's images are read, which is not smaller than ``size_at``.

        A random crop is resized once, to what the model sees. Others are read at their full size, shifted and flipped,
        and made smaller then, by every back-end: a shift of 2 pixels is the same part of an image in all epochs.
        """
        cropped = self.augment is not None and self.augment.crop == "random_resized"
        return self.size_at(epoch) if cropped else self.image_size

    def __post_init__(self) -> None:
        augment = self.augment
        if augment is None or augment.crop != "pad" or augment.padding_mode != "reflect":
            return
        if augment.padding >= self.image_size:
            raise RecipeError(
                f"data.augment.padding is {augment.padding}, but an image of {self.image_size} pixels can be "
                f"mirrored at its edge by at most {self.image_size - 1}: lower the padding, or use "
                "data.augment.padding_mode=zero."
            )


def evaluation_image(
    image: Image, size: int | Shape, evaluation_crop: float, interpolation: str = "bilinear", *, always: bool = False
) -> torch.Tensor:
    """Resize until the image just covers ``size / evaluation_crop``, and keep the centre; uint8 [C, height, width].

    An image that has this size already is not touched, unless told so. Training without a random resized crop starts
    from the same picture. Of one that would grow too large only the part around the crop is resized.

    Args:
        image: uint8 [H, W, C].
        size: Side of a square in pixels, or height and width of the result.
        evaluation_crop: Share of the resized image's side that is kept, in (0, 1].
        interpolation: ``bilinear`` or ``bicubic``.
        always: Whether an image of this size is resized and cropped too.
    """
    shape = (size, size) if isinstance(size, int) else size
    height, width = image.shape[:2]
    if (height, width) == shape and not (always and evaluation_crop < 1):
        return _channels_first(np.array(image))
    scaled, corner = evaluation_geometry((height, width), shape, evaluation_crop, always=always)
    if grows_too_large((height, width), scaled):
        image, scaled, corner = _around_crop(image, scaled, corner, shape)
    resized = _resize(image, *scaled, interpolation)
    top, left = corner
    kept = resized[:, top : top + shape[0], left : left + shape[1]]
    # A small part of a large picture would keep all of its memory while it waits for its batch.
    is_small = _MOST_KEPT * shape[0] * shape[1] < scaled[0] * scaled[1]
    return kept.permute(1, 2, 0).contiguous().permute(2, 0, 1) if is_small else kept


def grows_too_large(size: Shape, scaled: Shape) -> bool:
    """Whether resizing all of an image would take far more memory than the image: it is much longer than wide."""
    return scaled[0] * scaled[1] > max(_LARGEST_GROWN, size[0] * size[1])


def _around_crop(image: Image, scaled: Shape, corner: Shape, shape: Shape) -> tuple[Image, Shape, Shape]:
    """Cut an image that is to be enlarged down to its crop and the pixels that the filter needs around it.

    Returns:
        The part, its size when resized, and where in that the crop begins. Edges are moved by half a pixel at most.
    """
    parts, sizes, corners = [], [], []
    for own, resized, begin, kept in zip(image.shape[:2], scaled, corner, shape, strict=True):
        first = max(0, begin * own // resized - _FILTER_PIXELS)
        last = min(own, -(-(begin + kept) * own // resized) + _FILTER_PIXELS)
        parts.append(slice(first, last))
        sizes.append(round((last - first) * resized / own))
        corners.append(round(begin - first * resized / own))
    return image[parts[0], parts[1]], (sizes[0], sizes[1]), (corners[0], corners[1])


def evaluation_geometry(
    size: Shape, shape: Shape, evaluation_crop: float, *, always: bool = False
) -> tuple[Shape, tuple[int, int]]:
    """To which size an image is resized for evaluation, and where in that its centre crop begins (top, left).

    Args:
        size: Height and width of the image.
        shape: Height and width of the result.
        evaluation_crop: Share of the resized image's side that is kept, in (0, 1].
        always: Whether an image of this size is resized and cropped too.
    """
    if size == shape and not always:
        return size, (0, 0)
    height, width = size
    covered = (round(shape[0] / evaluation_crop), round(shape[1] / evaluation_crop))
    scaled = (max(covered[0], covered[1] * height // width), max(covered[1], covered[0] * width // height))
    top, left = (round((have - wanted) / 2) for have, wanted in zip(scaled, shape, strict=True))
    return scaled, (top, left)


def resized_part(part: Image, image_size: int, interpolation: str = "bilinear") -> torch.Tensor:
    """Resize a part of an image, uint8 [H, W, C], to the square the model sees; uint8 [C, S, S]."""
    return _resize(part, image_size, image_size, interpolation)


def _channels_first(image: Image) -> torch.Tensor:
    return _usable(image).permute(2, 0, 1)


def _usable(image: Image) -> torch.Tensor:
    # What Pillow decoded is read-only, and torch takes only writable memory: a copy, of the part in use.
    return torch.from_numpy(image if image.flags.writeable and image.flags.c_contiguous else np.array(image))


def _resize(image: Image, height: int, width: int, interpolation: str) -> torch.Tensor:
    if image.shape[:2] == (height, width):
        return _channels_first(image)
    # As a batch of one whose strides say that the channel is the fastest axis: torch would else take it for one whose
    # channels lie apart, and move every pixel twice.
    pixels = _usable(image)[None].permute(0, 3, 1, 2)
    return interpolate(pixels, size=(height, width), mode=interpolation, antialias=True)[0]
