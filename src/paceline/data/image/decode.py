"""How does an image file become pixels? One way for every format, mode and orientation, or a reason why not.

The result is what a person would see: the first frame, turned the way EXIF says, transparency laid over
white, and 16-bit greyscale scaled down instead of clipped.
"""

from __future__ import annotations

import io
import re
import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

# Pillow only warns above this size and refuses above twice as much; 256 MiB as RGB is no training image.
LARGEST_PIXELS = 89_478_485

_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_LYING = (5, 6, 7, 8)
_FROM_PILLOW = r"PIL\."
_SILENCE = ("ignore", None, Warning, re.compile(_FROM_PILLOW), 0)
_WITH_ALPHA = ("RGBA", "RGBa", "LA", "La", "PA")


class BrokenImageError(Exception):
    """An image that cannot be read; a run leaves it out and reports it."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def decode(source: bytes | str | Path, channels: int) -> NDArray[np.uint8]:
    """Decode an image file to uint8 [H, W, channels]; the array may be read-only.

    Args:
        source: The file's content, or its path.
        channels: 1 for greyscale (ITU-R 601 luma), 3 for RGB.

    Raises:
        BrokenImageError: If the file is missing, truncated, no image, larger than ``LARGEST_PIXELS``, or
            holds numbers without a fixed range (32-bit integers or floats).
    """
    name = "<bytes>" if isinstance(source, bytes) else str(source)
    _silence_pillow()
    try:
        content = source if isinstance(source, bytes) else _read(source)
        with Image.open(io.BytesIO(content)) as image:
            if image.width * image.height > LARGEST_PIXELS:
                raise ValueError(f"{image.width}x{image.height} pixels; at most {LARGEST_PIXELS:,} are decoded")
            image.load()
            return _pixels(_upright(image), channels, file_format=image.format)
    except BrokenImageError:
        raise
    except Exception as error:  # Pillow's plugins raise OSError, SyntaxError, ValueError, struct.error, KeyError, …
        raise BrokenImageError(name, _reason(error)) from error


def read_file(path: str | Path) -> bytes:
    """Return what a file holds; raises BrokenImageError."""
    try:
        return _read(path)
    except OSError as error:
        raise BrokenImageError(str(path), _reason(error)) from error


def image_header(path: str | Path) -> tuple[tuple[int, int], bool] | None:
    """Return ((height, width), is greyscale) from the file's head, or None if it cannot be read."""
    _silence_pillow()
    try:
        with Image.open(path) as image:
            return (image.height, image.width), image.mode in ("1", "L") or image.mode.startswith("I;16")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None


def upright_size(path: str | Path) -> tuple[int, int] | None:
    """Return (height, width) of the image as a person would see it, from the file's head; None if it has none.

    A PNG whose orientation is written behind its pixels is taken as it lies: finding it would mean reading them.
    """
    _silence_pillow()
    try:
        with Image.open(path) as image:
            size = (image.height, image.width)
            # Asked of the base class: the PNG plugin would decode the image first. TIFF's has turned it already.
            orientation = None if image.format == "TIFF" else Image.Image.getexif(image).get(_ORIENTATION)
    except Exception:  # noqa: BLE001 (Pillow's plugins raise anything; reading the image will say what is wrong)
        return None
    return size[::-1] if orientation in _LYING else size


def _read(path: str | Path) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, UnidentifiedImageError):
        return "not an image in any format that can be read"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _silence_pillow() -> None:
    """Make Pillow's own modules keep their warnings: each file is either read or reported as broken.

    For the whole process and for good, because ``warnings.catch_warnings`` swaps global state and this runs
    in threads. Repeated on each call, because others (a test runner) swap that state too; that costs 1 µs.
    """
    if _SILENCE not in warnings.filters:
        warnings.filterwarnings("ignore", module=_FROM_PILLOW)


def _upright(image: Image.Image) -> Image.Image:
    """Turn the image the way its EXIF orientation says; unreadable EXIF data say nothing."""
    # Asked after load(): the TIFF plugin turns the image itself and then drops the tag.
    try:
        orientation = image.getexif().get(_ORIENTATION)
    except Exception:  # noqa: BLE001 (metadata of any kind of damage must not lose a good picture)
        return image
    method = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    return image if method is None else image.transpose(method)


def _pixels(image: Image.Image, channels: int, *, file_format: str | None) -> NDArray[np.uint8]:
    """Convert a loaded image of any mode to uint8 [H, W, channels]."""
    if image.mode.startswith("I;16") or (image.mode == "I" and file_format == "PNG"):
        # Pillow would clip 16 bits to 8; keep the high byte, as it does for 16-bit colour.
        grey = (np.asarray(image).clip(0, 0xFFFF) >> 8).astype(np.uint8)
        return np.repeat(grey[:, :, None], channels, axis=2)
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode} (32 bits) have no fixed range; store 8 or 16 bits")
    if image.mode in _WITH_ALPHA or "transparency" in image.info:
        # Through RGBA first: a palette's transparency is lost in any other conversion.
        overlay = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", overlay.size, "white"), overlay)
    mode = "L" if channels == 1 else "RGB"
    pixels = np.asarray(image if image.mode == mode else image.convert(mode))
    return pixels[:, :, None] if channels == 1 else pixels
