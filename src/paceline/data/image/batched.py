"""How are many small images varied at once? By one gather and one flip, with no Python per sample."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from paceline.data.image.augmentation import Draws
from paceline.data.image.store import ImageStore, StoreShape
from paceline.recipe.data import Augment


def flip_some(images: torch.Tensor, flip: NDArray[np.bool_]) -> torch.Tensor:
    """Mirror the images marked in ``flip`` left to right, in place; uint8 [N, C, H, W], in main memory."""
    marked = np.flatnonzero(flip)
    if len(marked):
        mirrored = images.index_select(0, torch.from_numpy(marked)).flip(-1)
        # Written back by numpy, image by image; torch's index_copy_ does it byte by byte, in ten times the time.
        images.numpy()[marked] = mirrored.numpy()
    return images


def vary(images: torch.Tensor, augment: Augment, draws: Draws) -> torch.Tensor:
    """Shift and flip a batch as drawn, for images that are not held in a store; uint8 [N, C, S, S], in main memory."""
    if draws.offsets is not None:
        count, channels, size, _ = images.shape
        shape = StoreShape(
            count=count,
            channels=channels,
            size=size,
            padding=augment.padding,
            padding_mode=augment.padding_mode,
            channels_last=False,  # as the images lie
        )
        store = ImageStore(shape, images.device)
        store.put(0, images)
        starts = store.starts(np.arange(count), draws)
        images = store.gather(torch.from_numpy(starts)).contiguous()
    return flip_some(images, draws.flip)


def shrunk(images: torch.Tensor, size: int, interpolation: str = "bilinear") -> torch.Tensor:
    """Images uint8 [N, C, S, S] at a smaller size, each pixel from all that it covers; as they are if ``size`` is S.

    Of an image the result is the same whatever else is in the batch.

    Args:
        images: Shifted and flipped as they are to be.
        size: Height and width of the result.
        interpolation: ``bilinear`` or ``bicubic``.
    """
    if images.shape[-1] == size:
        return images
    if not len(images):
        return images.new_empty((0, images.shape[1], size, size))
    if images.device.type == "cpu":
        return functional.interpolate(images, size=(size, size), mode=interpolation, antialias=True)
    # Elsewhere torch resizes no whole numbers.
    smaller = functional.interpolate(images.float(), size=(size, size), mode=interpolation, antialias=True)
    return smaller.round_().clamp_(0, 255).to(torch.uint8)
