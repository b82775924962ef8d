"""Many small images in memory, arranged so that a batch of shifted and mirrored ones is a single gather.

Each image is stored with its border, and a second time mirrored if images are flipped. A crop is then a run of bytes
whose start is computed from the random draws. A batch is one ``index_select`` of such runs, viewed without the surplus
of each row. This is the same on a GPU and on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from paceline.data.image.transforms import Draws
from paceline.recipe.data import Augment

Starts = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class StoreShape:
    """Layout of images in a store.

    Attributes:
        count: Number of images.
        channels: 1 or 3.
        size: Height and width, in pixels.
        padding: Pixels of border on each side.
        padding_mode: Content of the border: ``zero`` or ``reflect``, the image mirrored at its edge.
        mirrored: Whether each image is also stored mirrored.
        channels_last: Whether the channel is the fastest axis.
    """

    count: int
    channels: int
    size: int
    padding: int = 0
    padding_mode: str = "zero"
    mirrored: bool = False
    channels_last: bool = True

    @classmethod
    def of(
        cls, augment: Augment | None, *, count: int, channels: int, size: int, channels_last: bool = True
    ) -> StoreShape:
        """Return the layout required by an augmentation, or by none."""
        augment = augment or Augment()
        return cls(
            count=count,
            channels=channels,
            size=size,
            padding=augment.padding if augment.crop == "pad" else 0,
            padding_mode=augment.padding_mode,
            mirrored=augment.flip > 0,
            channels_last=channels_last,
        )

    @property
    def side(self) -> int:
        """Height and width including the border."""
        return self.size + 2 * self.padding

    @property
    def row_bytes(self) -> int:
        """Bytes of a row with its border, in all channels."""
        return self.side * self.channels

    @property
    def image_bytes(self) -> int:
        """Bytes of an image with its border."""
        return self.side * self.row_bytes

    @property
    def bytes(self) -> int:
        """Bytes of the whole store."""
        # The last crop's run extends beyond the last image by less than a row.
        return self.count * self.image_bytes * (1 + self.mirrored) + self.row_bytes


class ImageStore:
    """Images of one size, uint8, held on a device."""

    def __init__(self, shape: StoreShape, device: torch.device, memory: torch.Tensor | None = None) -> None:
        """Allocate memory for images, initially black; or use memory that already contains them, uint8 [bytes]."""
        self.shape = shape
        self._memory = torch.zeros(shape.bytes, dtype=torch.uint8, device=device) if memory is None else memory
        run = shape.size * shape.row_bytes
        self._runs = self._memory.as_strided((max(len(self._memory) - run + 1, 0), run), (1, 1))

    @classmethod
    def over(cls, shape: StoreShape, device: torch.device, images: NDArray[np.uint8]) -> ImageStore | None:
        """Return a store over an existing array, uint8 [N, S, S, C]; None if the layout differs."""
        as_they_lie = not shape.padding and not shape.mirrored and (shape.channels_last or shape.channels == 1)
        fits = images.shape == (shape.count, shape.size, shape.size, shape.channels) and images.flags.c_contiguous
        # torch accepts only writable arrays; nothing is written here.
        if device.type != "cpu" or not as_they_lie or not fits or not images.flags.writeable or not images.size:
            return None
        return cls(shape, device, torch.from_numpy(images).view(-1))

    def put(self, first: int, images: torch.Tensor) -> None:
        """Store images uint8 [n, C, S, S] from index ``first`` on."""
        shape = self.shape
        images = images.to(self._memory.device)
        inside = slice(shape.padding, shape.padding + shape.size)
        plain, *others = self._pictures()
        bordered = plain[first : first + len(images)]
        bordered[:, :, inside, inside] = images
        if shape.padding and shape.padding_mode == "reflect":
            _reflect(bordered, shape.padding, shape.size)
        for mirrored in others:
            mirrored[first : first + len(images)] = bordered.flip(-1)

    def starts(self, numbers: NDArray[np.int64], draws: Draws | None) -> Starts:
        """Return the start of each image's run for its random draws, int64 [N]."""
        shape = self.shape
        starts = numbers * shape.image_bytes
        if draws is None:
            return starts
        pixel = shape.channels if shape.channels_last else 1
        if draws.offsets is not None:
            starts += draws.offsets[:, 0] * shape.row_bytes + draws.offsets[:, 1] * pixel
        if shape.mirrored:
            # In the mirrored image, the crop starts at the distance at which it ends in the original.
            across = 0 if draws.offsets is None else 2 * (shape.padding - draws.offsets[:, 1]) * pixel
            starts += draws.flip * (shape.count * shape.image_bytes + across)
        return starts

    def gather(self, starts: torch.Tensor) -> torch.Tensor:
        """Return the images whose runs start there, uint8 [N, C, S, S]; with gaps between rows if there is a border.

        Args:
            starts: Starts on the store's device, int64 [N].
        """
        return _pictures(self._runs.index_select(0, starts), self.shape, self.shape.size)[..., : self.shape.size]

    def _pictures(self) -> list[torch.Tensor]:
        """Return writable views of the plain images [N, C, side, side], and of the mirrored ones if stored."""
        shape = self.shape
        whole = shape.count * shape.image_bytes
        parts = [self._memory[at : at + whole] for at in (0, whole)[: 1 + shape.mirrored]]
        return [_pictures(part.view(shape.count, shape.image_bytes), shape, shape.side) for part in parts]


def _pictures(runs: torch.Tensor, shape: StoreShape, height: int) -> torch.Tensor:
    """View runs of bytes [N, ...] as [N, C, height, side]."""
    if shape.channels_last:
        return runs.view(len(runs), height, shape.side, shape.channels).permute(0, 3, 1, 2)
    return runs.view(len(runs), height, shape.channels, shape.side).permute(0, 2, 1, 3)


def _reflect(bordered: torch.Tensor, padding: int, size: int) -> None:
    """Fill the border of [N, C, S + 2p, S + 2p] by reflection, without repeating the edge pixels."""
    first, last = padding, padding + size - 1
    for distance in range(1, padding + 1):
        bordered[..., first - distance] = bordered[..., first + distance]
        bordered[..., last + distance] = bordered[..., last - distance]
    for distance in range(1, padding + 1):
        bordered[:, :, first - distance] = bordered[:, :, first + distance]
        bordered[:, :, last + distance] = bordered[:, :, last - distance]


def flip_some(images: torch.Tensor, flip: NDArray[np.bool_]) -> torch.Tensor:
    """Mirror the images marked in ``flip`` left to right, in place; uint8 [N, C, H, W], in main memory."""
    marked = np.flatnonzero(flip)
    if len(marked):
        mirrored = images.index_select(0, torch.from_numpy(marked)).flip(-1)
        # Written back by numpy, image by image; torch's index_copy_ works byte by byte and takes ten times as long.
        images.numpy()[marked] = mirrored.numpy()
    return images


def vary(images: torch.Tensor, augment: Augment, draws: Draws) -> torch.Tensor:
    """Shift and flip a batch as drawn, for images outside a store; uint8 [N, C, S, S], in main memory."""
    if draws.offsets is not None:
        count, channels, size, _ = images.shape
        shape = StoreShape(
            count=count,
            channels=channels,
            size=size,
            padding=augment.padding,
            padding_mode=augment.padding_mode,
            channels_last=False,  # in the images' memory format
        )
        store = ImageStore(shape, images.device)
        store.put(0, images)
        images = store.gather(torch.from_numpy(store.starts(np.arange(count), draws))).contiguous()
    return flip_some(images, draws.flip)


def shrunk(images: torch.Tensor, size: int, interpolation: str = "bilinear") -> torch.Tensor:
    """Return images uint8 [N, C, S, S] downscaled with antialiasing; unchanged if ``size`` is S.

    The result for an image does not depend on the rest of the batch.

    Args:
        images: Images, already shifted and flipped.
        size: Height and width of the result.
        interpolation: ``bilinear`` or ``bicubic``.
    """
    if images.shape[-1] == size:
        return images
    if not len(images):
        return images.new_empty((0, images.shape[1], size, size))
    if images.device.type == "cpu":
        return functional.interpolate(images, size=(size, size), mode=interpolation, antialias=True)
    # On other devices torch does not resize integers.
    smaller = functional.interpolate(images.float(), size=(size, size), mode=interpolation, antialias=True)
    return smaller.round_().clamp_(0, 255).to(torch.uint8)
