"""Read the pixels of an image file with Pillow as runs do.

`paceline export --format folder` copies this module, so it imports nothing of Paceline.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Content = bytes | bytearray | memoryview
Pixels = NDArray[np.uint8]

UNSUPPORTED = "is not supported: convert it, for example to a PNG of 8 bits"
# Pillow only warns above this size and refuses above twice as much; training images do not need 256 MiB as RGB.
LARGEST_PIXELS = 89_478_485

ORIENTATION = 0x0112
_TILE_SIDES = (0x0142, 0x0143)
_BITS, _COMPRESSION, _PHOTOMETRIC, _CHANNELS, _PLANES, _SAMPLE_FORMAT = 258, 259, 262, 277, 284, 339
_WHITE_IS_ZERO, _SIGNED = 0, 2
_PNG_DEPTH = 24  # position of the bit depth in IHDR
_SCALED = ("PNG", "PPM")  # formats whose mode I pixels are 16 bits wide and use their full range
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_FROM_PILLOW = r"PIL\."
_SILENCE = ("ignore", None, Warning, re.compile(_FROM_PILLOW), 0)
_WITH_ALPHA = ("RGBA", "RGBa", "LA", "La", "PA")


def open_image(file: BinaryIO) -> Image.Image:
    """Open an image file, whose pixels are not read yet.

    Raises:
        OSError: If Pillow cannot read it, or any other of Pillow's errors.
        ValueError: If it is too large, or Pillow would read it wrongly.
    """
    mute_pillow()
    image = Image.open(file)
    if image.width * image.height > LARGEST_PIXELS:
        raise ValueError(f"{image.width}x{image.height} pixels; at most {LARGEST_PIXELS:,} are decoded")
    if image.format == "TIFF":
        _check_tiles(image)
        tags, is_negative = getattr(image, "tag_v2", {}), _tag(image, _PHOTOMETRIC) == (_WHITE_IS_ZERO,)
        if fault := _plane_fault(tags, is_negative=is_negative):
            raise ValueError(f"{fault} {UNSUPPORTED}")
        if _SIGNED in _tag(image, _SAMPLE_FORMAT):
            bits = (_tag(image, _BITS) or (1,))[0]
            raise ValueError(f"signed numbers of {bits} bits have no fixed range; store unsigned ones of 8 or 16 bits")
    if image.format == "EPS":
        # Pillow would run Ghostscript on it.
        raise ValueError("an EPS file is a program, and is never run; convert it to PNG")
    return image


def decoded(image: Image.Image, content: Content, channels: int, *, turned: bool = True) -> Pixels:
    """Decode an opened image to uint8 [H, W, channels].

    Args:
        image: The image.
        content: The whole file.
        channels: 1 for greyscale (ITU-R 601 luma), 3 for RGB.
        turned: Whether to apply the EXIF rotation; it is always applied to a TIFF.

    Raises:
        ValueError: If its pixels have no fixed range, or any of Pillow's errors.
    """
    image.load()
    if image.format == "PNG":
        _correct_transparency(image, content)
    depth = grey_depth(image)
    return _pixels(_upright(image) if turned else image, channels, depth)


def mute_pillow() -> None:
    """Suppress the warnings of Pillow's modules: each file is either read or reported as broken.

    Applies to the whole process permanently, because ``warnings.catch_warnings`` swaps global state and this runs in
    threads. Repeated on each call, because others (such as a test runner) swap that state too; that costs 1 µs.
    """
    if _SILENCE not in warnings.filters:
        warnings.filterwarnings("ignore", module=_FROM_PILLOW)


def _tag(image: Image.Image, tag: int) -> tuple[int, ...]:
    """Return the values of a TIFF tag; empty if it is missing."""
    values = getattr(image, "tag_v2", {}).get(tag, ())
    return values if isinstance(values, tuple) else (values,)


def _check_tiles(image: Image.Image) -> None:
    """Apply the pixel limit to a TIFF's tiles too: each is decoded whole and may be far larger than the picture."""
    tags = getattr(image, "tag_v2", {})
    width, height = (int(tags.get(tag, 0)) for tag in _TILE_SIDES)
    if width * height > LARGEST_PIXELS:
        raise ValueError(f"tiles of {width}x{height} pixels; at most {LARGEST_PIXELS:,} are decoded")


def orientation_of(image: Image.Image) -> object:
    """Return the EXIF orientation of an image; None if it is missing or unreadable."""
    try:
        return image.getexif().get(ORIENTATION)
    except Exception:  # noqa: BLE001 (Pillow raises anything at damaged metadata, which must not lose a good picture)
        return None


def _plane_fault(tags: Mapping[int, Any], *, is_negative: bool) -> str:
    """Name channels stored one after another in a TIFF in a way that Pillow reads wrongly without an error."""
    bits, channels, compression = tags.get(_BITS, (1,)), tags.get(_CHANNELS, 1), tags.get(_COMPRESSION, 1)
    depth = max(bits) if isinstance(bits, tuple) else bits
    wrong = depth not in (1, 8) or (depth == 8 and channels == 1 and is_negative) if compression == 1 else channels == 2
    if tags.get(_PLANES, 1) != 2 or not wrong:
        return ""
    return f"a TIFF of {depth} bits with its channels one after another (PlanarConfiguration 2)"


def _upright(image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation to an image; unreadable EXIF data are ignored."""
    # Queried after load(): the TIFF plugin rotates the image itself and then drops the tag.
    orientation = orientation_of(image)
    method = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    return image if method is None else image.transpose(method)


def _correct_transparency(image: Image.Image, content: Content) -> None:
    """Scale the transparent colour of a loaded PNG to 8 bits: Pillow keeps the file's value."""
    depth, transparent = content[_PNG_DEPTH], image.info.get("transparency")
    if image.mode == "L" and depth < 8 and isinstance(transparent, int):
        image.info["transparency"] = transparent * 255 // (2**depth - 1)
    elif image.mode == "RGB" and depth == 16 and isinstance(transparent, tuple):
        # The pixels are the high bytes; with the wrong byte order they are the low ones.
        with Image.open(io.BytesIO(content)) as low:
            low.tile = [each._replace(args="RGB;16L") for each in low.tile]
            colours = np.asarray(image).astype(np.uint16) << 8 | np.asarray(low)
        del image.info["transparency"]
        image.putalpha(Image.fromarray((colours != transparent).any(axis=2)).convert("L"))


def grey_depth(image: Image.Image) -> tuple[int, bool]:
    """Return the bit depth of a grey image with more than 8 bits, else 0; and whether its maximum is black."""
    if image.mode.startswith("I;16") and image.format == "TIFF":
        return (_tag(image, _BITS) or (16,))[0], _tag(image, _PHOTOMETRIC) == (_WHITE_IS_ZERO,)
    # Pillow has already scaled a PGM's white to 16 bits.
    return 16 if image.mode.startswith("I;16") or (image.mode == "I" and image.format in _SCALED) else 0, False


def pixels_of(image: Image.Image, channels: int) -> Pixels:
    """Convert a Pillow image to uint8 [H, W, channels]; raises ValueError if its pixels have no fixed range."""
    return _pixels(image, channels, grey_depth(image))


def _high_bits(image: Image.Image, channels: int, depth: int, *, is_negative: bool) -> Pixels:
    """Keep the high 8 bits of grey pixels, which Pillow would clip; transparent pixels become white."""
    values = np.asarray(image).clip(0, 2**depth - 1)
    grey = (values >> (depth - 8)).astype(np.uint8)
    if is_negative:
        grey = 255 - grey
    grey[values == image.info.get("transparency", -1)] = 255
    return np.repeat(grey[:, :, None], channels, axis=2)


def _pixels(image: Image.Image, channels: int, grey_depth: tuple[int, bool]) -> Pixels:
    depth, is_negative = grey_depth
    if depth:
        return _high_bits(image, channels, depth, is_negative=is_negative)
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode} (32 bits) have no fixed range; store 8 or 16 bits")
    if image.mode in _WITH_ALPHA or "transparency" in image.info:
        # Via RGBA: any other conversion loses a palette's transparency.
        overlay = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", overlay.size, "white"), overlay)
    mode = "L" if channels == 1 else "RGB"
    pixels = np.asarray(image if image.mode == mode else image.convert(mode))
    return pixels[:, :, None] if channels == 1 else pixels
