"""Pixels in memory: how they become colour or grey, as decoding a file does it, and what they are known by."""

from __future__ import annotations

import hashlib

import numpy as np

from paceline.data.image.source import ArraySource, Image

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


def array_digest(*sources: ArraySource) -> str:
    """SHA-256 over the images and labels."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(np.ascontiguousarray(source.images).data)
        digest.update(np.ascontiguousarray(source.labels).data)
    return digest.hexdigest()
