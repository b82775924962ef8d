"""How are many small images varied at once? By one gather and one flip, with no Python per sample."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

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
