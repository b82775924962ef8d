"""How are plain JPEG files read fast, and by which decoder?

By `jpeg_region`, compiled where a compiler and libjpeg-turbo are there when Paceline is installed. It decodes only the
part that is asked for, to the bits of libjpeg-turbo's own full decoding, without the interpreter's lock. What it
declines is left to Pillow. Where it was not built, simplejpeg decodes whole files, if it is installed, else Pillow.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from paceline.data.image.augmentation import Box

try:
    from paceline.data.image import jpeg_region
except ImportError as error:
    _REGION, _WHY_NOT = None, str(error)
else:
    _REGION, _WHY_NOT = jpeg_region, ""

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

Content = bytes | bytearray | memoryview

# libjpeg's own limit; a file's head may say 65535.
_LONGEST_SIDE = 65_500


def head_of(content: Content) -> tuple[int, int, int] | None:
    """Return height and width of a JPEG file as it lies, and EXIF's orientation; None if it is for Pillow to judge."""
    head: tuple[int, int, int] | None = None if _REGION is None else _REGION.header(content)
    return head if head is not None and max(head[:2]) <= _LONGEST_SIDE else None


def read_part(content: Content, channels: int, box: Box, shrink: int = 1) -> NDArray[np.uint8] | None:
    """Decode a rectangle to uint8 [H, W, channels]; None if the file is for Pillow to judge.

    Args:
        content: The whole file.
        channels: 1 or 3.
        box: Which part, in pixels of the picture as it is decoded.
        shrink: 2, 4 or 8 to decode the picture that much smaller.
    """
    if _REGION is None:
        return None
    pixels = np.empty((box.height, box.width, channels), dtype=np.uint8)
    return pixels if _REGION.read_region(content, pixels, *box, shrink) else None


def read_whole(content: Content, size: tuple[int, int], shrink: int = 1) -> NDArray[np.uint8] | None:
    """Decode all of a file to RGB with simplejpeg; None where it is not to be used, or the file is Pillow's to judge.

    Args:
        content: The whole file: upright, not progressive, grey or colour in 4:4:4, 4:2:2 or 4:2:0.
        size: Height and width of the picture.
        shrink: 2, 4 or 8 to decode it that much smaller.
    """
    if _REGION is not None or simplejpeg is None:
        return None
    height, width = (-(-side // shrink) for side in size)
    try:
        # Strict: what libjpeg only warns of is an error too.
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(content, min_height=height, min_width=width, strict=True)
    except ValueError:
        return None
    return pixels if pixels.shape == (height, width, 3) else None


# Of the result; above, torch's vectorised resizing is faster, calls and all.
_SMALL = 48 * 48


def resizes(height: int, width: int) -> bool:
    """Whether :func:`read_resized` is there for results of this size, and the faster way."""
    return height * width <= _SMALL and _resizes_as_torch()


def read_resized(
    content: Content, channels: int, box: Box, shrink: int, size: tuple[int, int], *, bicubic: bool, flip: bool
) -> NDArray[np.uint8] | None:
    """Decode a rectangle as :func:`read_part` does and resize it, to the bits of torch's antialiased resizing.

    Args:
        content: The whole file.
        channels: 1 or 3.
        box: Which part, in pixels of the picture as it is decoded.
        shrink: 1, 2, 4 or 8.
        size: Height and width of the result.
        bicubic: Or else bilinear.
        flip: Whether the result is mirrored.
    """
    if _REGION is None:
        return None
    pixels = np.empty((*size, channels), dtype=np.uint8)
    return pixels if _REGION.read_resized(content, pixels, *box, shrink, *size, bicubic, flip) else None


@cache
def _resizes_as_torch() -> bool:
    """Try it, once per process: another torch, or another processor, may round otherwise."""
    if _REGION is None:
        return False
    import torch
    from torch.nn.functional import interpolate

    words = np.random.Philox(key=0).random_raw(30 * 41 * 3 // 8 + 1)
    image = words.view(np.uint8)[: 30 * 41 * 3].reshape(30, 41, 3)
    pixels = torch.from_numpy(image)[None].permute(0, 3, 1, 2)
    for bicubic in (False, True):
        for side in (24, 48):
            ours = np.empty((side, side, 3), dtype=np.uint8)
            done = _REGION.resize(image, *image.shape, ours, side, side, bicubic)
            theirs = interpolate(pixels, size=(side, side), mode="bicubic" if bicubic else "bilinear", antialias=True)
            if not done or not np.array_equal(ours, theirs[0].permute(1, 2, 0).numpy()):
                return False
    return True


def describe_decoder() -> str:
    """Say what reads JPEG files here, and why nothing faster does; for people."""
    if _REGION is not None:
        return f"compiled, with {_REGION.LIBRARY}: only what a crop needs is decoded"
    fallback = "Pillow" if simplejpeg is None else f"simplejpeg {simplejpeg.__version__}"
    return f"{fallback}; the compiled decoder is not available ({_WHY_NOT})"
