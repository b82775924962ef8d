"""How are decoded pixels made colour or grey? As decoding a file does it, to the bit."""

from __future__ import annotations

import numpy as np

from paceline.data.image.source import Image

# ITU-R 601 luma in 16 bits, as Pillow has it.
_LUMA = np.array([19595, 38470, 7471], dtype=np.uint32)


def with_channels(images: Image, wanted: int) -> Image:
    """Return images uint8 [..., C] with ``wanted`` channels, 1 or 3."""
    have = images.shape[-1]
    if have == wanted:
        return images
    if wanted == 3:
        return np.repeat(images, 3, axis=-1)
    return ((images @ _LUMA + 0x8000) >> 16).astype(np.uint8)[..., None]
