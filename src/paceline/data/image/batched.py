"""How are many small images varied at once? By one gather and one flip, with no Python per sample."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data.image.augmentation import Draws
from paceline.recipe.data import Augment

Ids = NDArray[np.int64]

_FILLED_AT_ONCE = 4096  # images; bounds the temporary copy while padding


class PaddedImages:
    """Images stored with a border all around, so that a shifted image is one run of bytes.

    The layout is [N, H + 2p, C, W + 2p]: the S rows of a crop follow one another with all their channels,
    and a horizontal shift only moves where the run begins. A batch of crops is thus one ``index_select``
    that copies one run per sample (far faster than indexing pixels), and a view without each row's surplus.
    """

    def __init__(self, images: torch.Tensor, padding: int, mode: str) -> None:
        """Copy ``images`` uint8 [N, C, S, S] with a border of ``padding`` pixels, ``zero`` or ``reflect``."""
        count, channels, size, _ = images.shape
        side = size + 2 * padding
        self._image_bytes = side * channels * side
        self._row_bytes = channels * side
        self._shape = (size, channels, side)
        # The last crop's run reaches past the last image by up to 2·padding bytes.
        memory = torch.zeros(count * self._image_bytes + side, dtype=torch.uint8, device=images.device)
        _fill(memory[: count * self._image_bytes].view(count, side, channels, side), images, padding, mode)
        run = size * self._row_bytes
        self._runs = memory.as_strided((max(len(memory) - run + 1, 0), run), (1, 1))

    def crop(self, ids: Ids, offsets: Ids) -> torch.Tensor:
        """Return each image's crop with its corner (top, left) at ``offsets`` [N, 2]; uint8 [N, C, S, S]."""
        size, channels, side = self._shape
        starts = ids * self._image_bytes + offsets[:, 0] * self._row_bytes + offsets[:, 1]
        runs = self._runs.index_select(0, index_tensor(starts, self._runs.device))
        rows = runs.view(len(ids), size, channels, side)[..., :size]
        return rows.permute(0, 2, 1, 3).contiguous()


def index_tensor(ids: Ids, device: torch.device) -> torch.Tensor:
    """Return ids as a tensor; those of an epoch's order are read-only, which torch takes only as a copy."""
    index = torch.from_numpy(ids if ids.flags.writeable else ids.copy())
    return index if device.type == "cpu" else index.to(device)


def flip_some(images: torch.Tensor, flip: NDArray[np.bool_]) -> torch.Tensor:
    """Mirror the images marked in ``flip`` left to right, in place; uint8 [N, C, H, W]."""
    marked = index_tensor(np.flatnonzero(flip), images.device)
    if len(marked):
        images.index_copy_(0, marked, images.index_select(0, marked).flip(-1))
    return images


def vary(images: torch.Tensor, augment: Augment, draws: Draws) -> torch.Tensor:
    """Shift and flip a batch as drawn, for images that are not kept padded; uint8 [N, C, S, S]."""
    if draws.offsets is not None:
        padded = PaddedImages(images, augment.padding, augment.padding_mode)
        images = padded.crop(np.arange(len(images)), draws.offsets)
    return flip_some(images, draws.flip)


def _fill(bordered: torch.Tensor, images: torch.Tensor, padding: int, mode: str) -> None:
    """Write ``images`` [N, C, S, S] into ``bordered`` [N, S + 2p, C, S + 2p], with the border around."""
    size = images.shape[-1]
    inside = slice(padding, padding + size)
    for start in range(0, len(images), _FILLED_AT_ONCE):
        stop = start + _FILLED_AT_ONCE
        bordered[start:stop, inside, :, inside] = images[start:stop].permute(0, 2, 1, 3)
    if mode != "reflect":
        return
    for distance in range(1, padding + 1):  # mirrored at the edge pixel, which is not repeated
        first, last = padding, padding + size - 1
        bordered[:, :, :, first - distance] = bordered[:, :, :, first + distance]
        bordered[:, :, :, last + distance] = bordered[:, :, :, last - distance]
    for distance in range(1, padding + 1):
        first, last = padding, padding + size - 1
        bordered[:, first - distance] = bordered[:, first + distance]
        bordered[:, last + distance] = bordered[:, last - distance]
