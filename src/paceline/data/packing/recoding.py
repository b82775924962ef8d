"""How does an image become what is stored? The file as it is, a JPEG of its own, or pixels."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
from PIL import Image as Pillow
from PIL import ImageOps

from paceline.data.image.decode import BrokenImageError, decode, image_header
from paceline.data.image.packed_layout import Form
from paceline.data.image.source import Image, SampleSource, encoded_source

Content = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Stored:
    """An image as it is stored.

    Attributes:
        content: Its bytes.
        height: Of the pixels that they stand for.
        width: Likewise.
    """

    content: Content
    height: int
    width: int


def stored(source: SampleSource, sample: int, form: Form) -> Stored:
    """Bring one image into a form; it has been decoded once when this returns.

    Raises:
        BrokenImageError: If it cannot be read.
    """
    if form.mode == "original":
        files = encoded_source(source)
        assert files is not None
        content = files.encoded(sample)
        height, width = _decoded(content, 3, source, sample).shape[:2]
        return Stored(content, height, width)
    files = encoded_source(source)
    if files is not None:
        content = files.encoded(sample)
        channels = form.channels if form.mode == "raw" else _channels_of(content)
        pixels = _decoded(content, channels, source, sample)
    else:
        pixels = source.read(sample)
    pixels = _fitted(pixels, form)
    height, width = pixels.shape[:2]
    if form.mode == "raw":
        return Stored(np.ascontiguousarray(pixels).tobytes(), height, width)
    return Stored(_jpeg(pixels, form), height, width)


def _decoded(content: Content, channels: int, source: SampleSource, sample: int) -> Image:
    try:
        return decode(bytes(content), channels)
    except BrokenImageError as error:
        raise BrokenImageError(source.path(sample), error.reason) from error


def _channels_of(content: Content) -> int:
    """A grey picture stays grey: its file is smaller, and it says so when it is opened."""
    head = image_header(io.BytesIO(content))
    return 1 if head is not None and head[1] else 3


def _fitted(pixels: Image, form: Form) -> Image:
    """Make an image smaller, or a square, as far as the form asks for it."""
    height, width = pixels.shape[:2]
    if form.size is not None:
        if (height, width) == (form.size, form.size):
            return pixels
        square = ImageOps.fit(_picture(pixels), (form.size, form.size), Pillow.Resampling.LANCZOS)
        return _array(square)
    if form.max_side is None or max(height, width) <= form.max_side:
        return pixels
    ratio = form.max_side / max(height, width)
    size = (max(1, round(width * ratio)), max(1, round(height * ratio)))
    return _array(_picture(pixels).resize(size, Pillow.Resampling.LANCZOS))


def _picture(pixels: Image) -> Pillow.Image:
    return Pillow.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)


def _array(picture: Pillow.Image) -> Image:
    pixels = np.asarray(picture)
    return pixels if pixels.ndim == 3 else pixels[..., None]


def _jpeg(pixels: Image, form: Form) -> bytes:
    assert form.quality is not None
    out = io.BytesIO()
    # Colour at half the resolution, as cameras do and ImageNet's files are: a third less to decode.
    _picture(pixels).save(out, "JPEG", quality=form.quality, subsampling="4:2:0")
    return out.getvalue()
