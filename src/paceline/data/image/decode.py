"""Decode image files to pixels, in one way for every format, mode and orientation, or explain why not.

The result is what a viewer would show: the first frame, rotated by EXIF, with transparency over white, and 12- or
16-bit greyscale scaled down instead of clipped. If annotations refer to stored pixels, the orientation stays as stored.

Pillow reads all formats and reports defects. Faster decoders read plain JPEG files, with bit-identical results; Pillow
handles what these reject. `jpeg_region` is compiled on installation if a compiler and libjpeg-turbo are available. It
decodes only the requested region and releases the GIL. If it was not built, simplejpeg decodes whole files, if
installed.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, JpegImagePlugin, TiffImagePlugin, UnidentifiedImageError

from paceline.data.image.pillow_pixels import (
    LARGEST_PIXELS,
    ORIENTATION,
    UNSUPPORTED,
    Content,
    Pixels,
    decoded,
    grey_depth,
    mute_pillow,
    open_image,
    orientation_of,
)
from paceline.parsing.files import LFS_POINTER, LFS_START


class Box(NamedTuple):
    """A region of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


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

try:
    import pillow_heif
except ImportError:
    HEIF_ENDINGS: tuple[str, ...] = ()
else:
    pillow_heif.register_heif_opener()
    HEIF_ENDINGS = ("heic", "heif")

# libjpeg's limit; a file's header may say 65535.
_LONGEST_SIDE = 65_500


def head_of(content: Content) -> tuple[int, int, int] | None:
    """Return a JPEG file's stored height and width and its EXIF orientation; None if only Pillow can judge it."""
    head: tuple[int, int, int] | None = None if _REGION is None else _REGION.header(content)
    return head if head is not None and max(head[:2]) <= _LONGEST_SIDE else None


def read_part(content: Content, channels: int, box: Box, shrink: int = 1) -> NDArray[np.uint8] | None:
    """Decode a rectangle to uint8 [H, W, channels]; None if only Pillow can judge the file.

    Args:
        content: The whole file.
        channels: 1 or 3.
        box: The rectangle, in pixels of the decoded picture.
        shrink: 2, 4 or 8 to decode at 1/2, 1/4 or 1/8 size.
    """
    assert _REGION is not None  # it read the head
    pixels = np.empty((box.height, box.width, channels), dtype=np.uint8)
    return pixels if _REGION.read_region(content, pixels, *box, shrink) else None


def read_whole(content: Content, size: tuple[int, int], shrink: int = 1) -> NDArray[np.uint8] | None:
    """Decode a whole file to RGB with simplejpeg; None if it is not available, or only Pillow can judge the file.

    Args:
        content: The whole file: upright, not progressive, grey or colour in 4:4:4, 4:2:2 or 4:2:0.
        size: Height and width of the picture.
        shrink: 2, 4 or 8 to decode at 1/2, 1/4 or 1/8 size.
    """
    if _REGION is not None or simplejpeg is None:
        return None
    height, width = (-(-side // shrink) for side in size)
    try:
        # Strict: libjpeg's warnings are errors too.
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(content, min_height=height, min_width=width, strict=True)
    except ValueError:
        return None
    return pixels if pixels.shape == (height, width, 3) else None


# Pixels of the result; above this, torch's vectorised resizing is faster despite the call overhead.
_SMALL = 48 * 48


def resizes(height: int, width: int) -> bool:
    """Whether :func:`read_resized` supports results of this size and is the faster way."""
    return height * width <= _SMALL and _resizes_as_torch()


def read_resized(
    content: Content, channels: int, box: Box, shrink: int, size: tuple[int, int], *, bicubic: bool, flip: bool
) -> NDArray[np.uint8] | None:
    """Decode a rectangle like :func:`read_part` and resize it, bit-identically to torch's antialiased resizing.

    Args:
        content: The whole file.
        channels: 1 or 3.
        box: The rectangle, in pixels of the decoded picture.
        shrink: 1, 2, 4 or 8.
        size: Height and width of the result.
        bicubic: Whether to resize bicubically, otherwise bilinearly.
        flip: Whether to mirror the result.
    """
    assert _REGION is not None  # it read the head
    pixels = np.empty((*size, channels), dtype=np.uint8)
    return pixels if _REGION.read_resized(content, pixels, *box, shrink, *size, bicubic, flip) else None


@cache
def _resizes_as_torch() -> bool:
    """Test the equality once per process: another torch or CPU may round differently."""
    if _REGION is None:
        return False
    import torch
    from torch.nn.functional import interpolate

    random_words = np.random.Philox(key=0).random_raw(30 * 41 * 3 // 8 + 1)
    image = random_words.view(np.uint8)[: 30 * 41 * 3].reshape(30, 41, 3)
    pixels = torch.from_numpy(image)[None].permute(0, 3, 1, 2)
    for bicubic in (False, True):
        for side in (24, 48):
            decoded = np.empty((side, side, 3), dtype=np.uint8)
            done = _REGION.resize(image, *image.shape, decoded, side, side, bicubic)
            reference = interpolate(
                pixels, size=(side, side), mode="bicubic" if bicubic else "bilinear", antialias=True
            )
            if not done or not np.array_equal(decoded, reference[0].permute(1, 2, 0).numpy()):
                return False
    return True


def describe_decoder() -> str:
    """Describe the JPEG decoder in use, and why no faster one is."""
    if _REGION is not None:
        return f"compiled, with {_REGION.LIBRARY}: only what a crop needs is decoded"
    fallback = "Pillow" if simplejpeg is None else f"simplejpeg {simplejpeg.__version__}"
    return f"{fallback}; the compiled decoder is not available ({_WHY_NOT})"


Result = TypeVar("Result")

_LYING = (5, 6, 7, 8)
# In the upright picture, after the axes of a rotated one are swapped.
_MIRRORED_ROWS = (3, 4, 7, 8)
_MIRRORED_COLUMNS = (2, 3, 6, 7)


class BrokenImageError(Exception):
    """An image that cannot be read; a run skips and reports it."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class LazyImage:
    """An image file: its size is known at once, its pixels are decoded on request.

    Attributes:
        size: Height and width of the upright picture.
        shrinks: Whether the file can be decoded at reduced size: an upright, plain JPEG.
    """

    def __init__(self, content: Content, channels: int, name: str = "", *, turned: bool = True) -> None:
        """Read the header of a file.

        Args:
            content: The whole file.
            channels: 1 for greyscale (ITU-R 601 luma), 3 for RGB.
            name: Name in error messages; if empty, the caller adds it.
            turned: Whether to apply the EXIF rotation.

        Raises:
            BrokenImageError: If the file is truncated, not an image, larger than ``LARGEST_PIXELS``, or has pixels
                without a fixed range (32-bit integers or floats); some of this only :meth:`part` detects.
        """
        self._content = content
        self._channels = channels
        self._name = name
        self._decoded: Pixels | None = None
        self._image: Image.Image | None = None
        self._is_simple = False
        self._is_turned = turned
        self._orientation = 1
        head = head_of(content)
        self._is_plain = head is not None and head[0] * head[1] <= LARGEST_PIXELS
        if head is not None and self._is_plain:
            height, width, orientation = head
            self._orientation = orientation if turned else 1
            self.size = (width, height) if self._orientation in _LYING else (height, width)
            self.shrinks = self._orientation == 1
        else:
            _explain(name, self._configure_pillow, content)

    def part(self, box: Box | None = None, shrink: int = 1) -> Pixels:
        """Decode a rectangle, or everything, to uint8 [H, W, channels]; the array may be read-only.

        Args:
            box: The rectangle, in pixels of the picture, aligned to ``shrink``. None for all.
            shrink: 2, 4 or 8 to decode at 1/2, 1/4 or 1/8 size, if the file ``shrinks``.

        Raises:
            BrokenImageError: As for the constructor.
        """
        smaller = self._smaller(box, shrink)
        if self._is_plain:
            pixels = read_part(self._content, self._channels, self._in_stored_orientation(smaller), shrink)
            if pixels is not None:
                return _turned(pixels, self._orientation)
        whole = self._decoded
        if whole is None and self._is_simple and self._channels == 3:
            whole = read_whole(self._content, self.size, shrink)
        if whole is None:
            whole = _explain(self._name, lambda: self._with_pillow(shrink), self._content)
        top, left, rows, columns = smaller
        return whole[top : top + rows, left : left + columns]

    def resized_part(
        self, box: Box | None, shrink: int, size: tuple[int, int], *, bicubic: bool, flip: bool
    ) -> Pixels | None:
        """Decode like :meth:`part` and resize in one step; None if that is not possible.

        Args:
            box: As for :meth:`part`.
            shrink: As for :meth:`part`.
            size: Height and width of the result.
            bicubic: Whether to resize bicubically, otherwise bilinearly.
            flip: Whether to mirror the result.
        """
        if not self._is_plain or self._orientation != 1:
            return None
        smaller = self._smaller(box, shrink)
        return read_resized(self._content, self._channels, smaller, shrink, size, bicubic=bicubic, flip=flip)

    def _smaller(self, box: Box | None, shrink: int) -> Box:
        if box is None:
            return Box(0, 0, -(-self.size[0] // shrink), -(-self.size[1] // shrink))
        return box if shrink == 1 else Box(*(each // shrink for each in box))

    def _in_stored_orientation(self, box: Box) -> Box:
        """Return a region's position in the stored picture, before rotation."""
        if self._orientation == 1:
            return box
        top, left, height, width = box
        if self._orientation in _MIRRORED_ROWS:
            top = self.size[0] - top - height
        if self._orientation in _MIRRORED_COLUMNS:
            left = self.size[1] - left - width
        return Box(left, top, width, height) if self._orientation in _LYING else Box(top, left, height, width)

    def _configure_pillow(self) -> None:
        image = self._image = _opened(io.BytesIO(self._content))
        self.shrinks = _is_plain_jpeg(image)
        if self.shrinks:
            self.size = image.height, image.width
            self._is_simple = _is_simple(image)
        else:
            self._decoded = self._with_pillow(1)
            self.size = self._decoded.shape[0], self._decoded.shape[1]

    def _with_pillow(self, shrink: int) -> Pixels:
        opened, self._image = self._image, None
        with opened or _opened(io.BytesIO(self._content)) as image:
            if shrink > 1:
                image.draft(None, (image.width // shrink, image.height // shrink))
            return decoded(image, self._content, self._channels, turned=self._is_turned)


class DecodedImage:
    """Pixels in memory, with the interface of a :class:`LazyImage`."""

    shrinks = False

    def __init__(self, pixels: Pixels) -> None:
        """Take pixels, uint8 [H, W, C]."""
        self.size = pixels.shape[0], pixels.shape[1]
        self._pixels = pixels

    def part(self, box: Box | None = None, shrink: int = 1) -> Pixels:
        """Return a rectangle, or everything; ``shrink`` is 1."""
        assert shrink == 1
        if box is None:
            return self._pixels
        return self._pixels[box.top : box.top + box.height, box.left : box.left + box.width]


def decode(source: Content | str | Path, channels: int, *, turned: bool = True) -> Pixels:
    """Decode an image file to uint8 [H, W, channels]; the array may be read-only.

    Args:
        source: The file's content, or its path.
        channels: 1 for greyscale (ITU-R 601 luma), 3 for RGB.
        turned: Whether to apply the EXIF rotation; it is always applied to a TIFF.

    Raises:
        BrokenImageError: If the file is missing, truncated, not an image, larger than ``LARGEST_PIXELS``, or has pixels
            without a fixed range (32-bit integers or floats).
    """
    if isinstance(source, str | Path):
        return LazyImage(read_file(source), channels, str(source), turned=turned).part()
    return LazyImage(source, channels, "<bytes>", turned=turned).part()


def read_file(path: str | Path) -> bytes:
    """Return a file's content; raises BrokenImageError."""
    try:
        # Reads to the end, whatever the reported size: a pipe has none.
        with open(path, "rb", buffering=0) as file:
            return file.readall()
    except OSError as error:
        raise BrokenImageError(str(path), _reason(error)) from error


def image_header(
    path: str | Path | BinaryIO | bytes, formats: tuple[str, ...] | None = None
) -> tuple[tuple[int, int], bool] | None:
    """Return ((height, width), is greyscale) from the header of a file or its content; None if it cannot be read.

    Args:
        path: The file, or its content.
        formats: Pillow's names of the formats to try; None for all.
    """
    mute_pillow()
    try:
        with Image.open(io.BytesIO(path) if isinstance(path, bytes) else path, formats=formats) as image:
            return (image.height, image.width), image.mode in ("1", "L") or grey_depth(image)[0] > 0
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None


def exceeds_limit(content: bytes, formats: tuple[str, ...]) -> bool:
    """Whether the header of a file's content says more pixels than Pillow opens."""
    mute_pillow()
    try:
        Image.open(io.BytesIO(content), formats=formats).close()
    except Image.DecompressionBombError:
        return True
    except Exception:  # noqa: BLE001 (Pillow's plugins raise anything)
        return False
    return False


def upright_size(path: str | Path | BinaryIO) -> tuple[int, int] | None:
    """Return (height, width) of the upright image from the file's header; None if unreadable.

    The orientation of a PNG is ignored if it is stored after the pixels, since finding it would require reading them.
    """
    mute_pillow()
    try:
        with Image.open(path) as image:
            size = (image.height, image.width)
            # Calls the base class: the PNG plugin would decode the image first. TIFF's has already rotated the size.
            orientation = None if image.format == "TIFF" else Image.Image.getexif(image).get(ORIENTATION)
    except Exception:  # noqa: BLE001 (Pillow's plugins raise anything; reading the image will say what is wrong)
        return None
    return size[::-1] if orientation in _LYING else size


def check_head(path: str) -> None:
    """Read the header of an image file; raises BrokenImageError if it shows that the file cannot be decoded."""
    with open(path, "rb") as file:
        if _explain(path, lambda: _opened(file)).format != "JPEG":
            return
        length = file.tell()
        file.seek(0)
        # Pillow opens some JPEG files that it cannot decode.
        if kind := unsupported_kind(file.read(length)):
            raise BrokenImageError(path, f"{kind} {UNSUPPORTED}")


_OTHERS = (
    (LFS_START, LFS_POINTER),
    (b"%PDF", "a PDF document"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "gzip-compressed data"),
    (b"\xff\x0a", "a JPEG XL image"),
    (b"\0\0\0\x0cJXL ", "a JPEG XL image"),
)
_HTML = (b"<!doctype html", b"<html")
_HEIF_BRANDS = (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1")
NEEDS_HEIF = "a HEIC image, which needs pip install 'paceline[heic]'"


def _lacks_heif(head: bytes) -> bool:
    """Whether a file is a HEIC image and its reader is not installed."""
    return not HEIF_ENDINGS and head[4:8] == b"ftyp" and head[8:12] in _HEIF_BRANDS


def guess_format(head: bytes) -> str:
    """Describe what a file that is not an image looks like; empty if its first bytes do not tell."""
    for beginning, name in _OTHERS:
        if head.startswith(beginning):
            return name
    if head.lstrip().lower().startswith(_HTML):
        return "a web page"
    if _lacks_heif(head):
        return NEEDS_HEIF
    if head[4:8] == b"ftyp":
        return f"a {head[8:12].decode('ascii', 'replace').strip()} file (HEIC, AVIF or a video)"
    return ""


def _opened(file: BinaryIO) -> Image.Image:
    start = file.read(len(LFS_START))
    if start == LFS_START:
        raise ValueError(LFS_POINTER)
    if _lacks_heif(start):
        raise ValueError(NEEDS_HEIF)
    return open_image(file)


def _is_plain_jpeg(image: Image.Image) -> bool:
    """Whether a JPEG file is upright and colour or grey, so that its size is known before decoding."""
    if image.format != "JPEG" or image.mode not in ("L", "RGB"):
        return False
    return orientation_of(image) in (None, 1)


def _is_simple(image: Image.Image) -> bool:
    """Whether all versions of libjpeg-turbo decode a plain JPEG file alike, even if it is damaged."""
    is_usual = image.mode == "L" or JpegImagePlugin.get_sampling(image) in (0, 1, 2)
    return is_usual and "progressive" not in image.info


def _explain(name: str, read: Callable[[], Result], content: Content | None = None) -> Result:
    """Run a block and turn any error of Pillow for a file, or its content, into BrokenImageError."""
    try:
        return read()
    except BrokenImageError:
        raise
    except Exception as error:  # Pillow's plugins raise OSError, SyntaxError, ValueError, struct.error, KeyError, …
        reason = _reason(error)
        content = read_file(name) if content is None else content
        if UNSUPPORTED not in reason and (kind := unsupported_kind(bytes(content), str(error))):
            reason = f"{kind} {UNSUPPORTED}"
        raise BrokenImageError(name, reason) from error


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, UnidentifiedImageError):
        return "not an image in a supported format"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _turned(pixels: Pixels, orientation: int) -> Pixels:
    """Apply the EXIF orientation to decoded pixels."""
    if orientation == 1:
        return pixels
    if orientation in _LYING:
        pixels = pixels.swapaxes(0, 1)
    if orientation in _MIRRORED_ROWS:
        pixels = pixels[::-1]
    if orientation in _MIRRORED_COLUMNS:
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


# By the number of the start-of-frame marker; libjpeg reads 0 to 2, and mostly 9 and 10.
_JPEGS = {
    **dict.fromkeys((0xC0, 0xC1, 0xC2), "a JPEG"),
    **dict.fromkeys((0xC3, 0xCB), "a lossless JPEG"),
    **dict.fromkeys((0xC5, 0xC6, 0xC7, 0xCD, 0xCE, 0xCF), "a hierarchical JPEG"),
    **dict.fromkeys((0xC9, 0xCA), "an arithmetic-coded JPEG"),
    0xF7: "a JPEG-LS image",
}
_SEGMENT = re.compile(rb"\xff+([\xc0-\xfe])(..)(.?)....(.?)", re.DOTALL)
_BITS_PER_SAMPLE, _COMPRESSION, _CHANNELS, _FORMAT = 258, 259, 277, 339
_PIXELS = (273, 324)  # positions of strips or tiles
_OLD_JPEG = 6
_NUMBERS = {2: "-bit signed numbers", 3: "-bit floating-point numbers"}
_OF_PILLOW = re.compile(r"unsupported|not supported|not available|unknown raw mode|cannot identify", re.IGNORECASE)


def unsupported_kind(content: bytes, error: str = "") -> str:
    """Name the unsupported kind of an image file with an intact header; empty if its kind is supported or unknown.

    Args:
        content: The file; the beginning of a JPEG suffices.
        error: The decoder's message, if it was tried.
    """
    if content.startswith(b"\xff\xd8"):
        return _jpeg_kind(content, failed=bool(error))
    if content[:2] in (b"II", b"MM") and error:
        return _tiff_kind(content, error)
    return f"its kind ({error})" if error.startswith("Unsupported") else ""


def _jpeg_kind(content: bytes, *, failed: bool) -> str:
    position = 2
    while (found := _SEGMENT.match(content, position)) is not None and found[1][0] not in _JPEGS:
        position = found.start(2) + int.from_bytes(found[2], "big")
    if found is None or not found[4]:
        return ""
    name, bits, channels = _JPEGS[found[1][0]], found[3][0], found[4][0]
    is_read = name == "a JPEG" or (name.startswith("an arithmetic") and not failed)
    return "" if is_read and bits == 8 and channels in (1, 3, 4) else f"{name} of {bits} bits, {channels} channel(s),"


def _tiff_kind(content: bytes, error: str) -> str:
    try:
        tags = TiffImagePlugin.ImageFileDirectory_v2(content[: 16 if content[2:3] == b"+" else 8])
        file = io.BytesIO(content)
        file.seek(tags.next)
        tags.load(file)
        values = [tags.get(tag, 1) for tag in (_COMPRESSION, _CHANNELS, _BITS_PER_SAMPLE, _FORMAT)]
        compression, channels, bits, numbers = (each[0] if isinstance(each, tuple) else each for each in values)
        has_pixels = any(tag in tags for tag in _PIXELS)
    except Exception:  # noqa: BLE001 (Pillow's parser raises anything at damaged tags)
        return ""
    if compression not in TiffImagePlugin.COMPRESSION_INFO or compression == _OLD_JPEG:
        return f"a TIFF of compression {compression}"
    is_known = has_pixels and _OF_PILLOW.search(error)
    return f"a TIFF of {channels} channel(s) of {bits}{_NUMBERS.get(numbers, ' bits')}" if is_known else ""
