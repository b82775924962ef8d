"""How are plain JPEG files read fast, and by which decoder?

By `jpeg_region`, compiled where a compiler and libjpeg-turbo are there when Paceline is installed. It decodes only the
part that is asked for, to the bits of libjpeg-turbo's own full decoding, without the interpreter's lock. What it
declines, and everything where it was not built, is left to Pillow.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.data.image.augmentation import Box

try:
    from paceline.data.image import jpeg_region
except ImportError as error:
    _REGION, _WHY_NOT = None, str(error)
else:
    _REGION, _WHY_NOT = jpeg_region, ""

Content = bytes | bytearray | memoryview


def size_of(content: Content) -> tuple[int, int] | None:
    """Return (height, width) of a JPEG file that can be read here; None if it is for Pillow to judge."""
    if _REGION is None:
        return None
    head = _REGION.header(content)
    return None if head is None else (head[0], head[1])


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


def describe_decoder() -> str:
    """Say what reads JPEG files here, and why nothing faster does; for people."""
    if _REGION is not None:
        return f"compiled, with {_REGION.LIBRARY}: only what a crop needs is decoded"
    return f"Pillow; the compiled decoder is not available ({_WHY_NOT})"
