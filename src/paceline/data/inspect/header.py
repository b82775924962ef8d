"""What does a file say of itself before it is decoded, and why can it perhaps not be?"""

from __future__ import annotations

import io
import re
import warnings
from dataclasses import dataclass

from PIL import Image
from PIL.TiffImagePlugin import TiffImageFile

from paceline.data.image.decode import LARGEST_PIXELS
from paceline.data.image.source import Content
from paceline.files import LFS_POINTER, LFS_START

_ORIENTATION = 0x0112
_BITS_PER_SAMPLE = 258
_JPEG_START, _JPEG_END = b"\xff\xd8", b"\xff\xd9"
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # any that is not part of the pixels' data
_EXTENSIONS = {
    "BMP": ("bmp",),
    "DIB": ("bmp",),
    "GIF": ("gif",),
    "JPEG": ("jpg", "jpeg"),
    "MPO": ("jpg", "jpeg"),  # a JPEG with further pictures behind it
    "PNG": ("png",),
    "PPM": ("ppm",),
    "TIFF": ("tif", "tiff"),
    "WEBP": ("webp",),
}
_BEGINNINGS = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM", b"RIFF", b"II*\0", b"MM\0*", b"P6", b"P5")
_OTHERS = (
    (LFS_START, LFS_POINTER),
    (b"%PDF", "a PDF document"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "gzip-compressed data"),
)
_HTML = (b"<!doctype html", b"<html")


@dataclass(frozen=True)
class Header:
    """What the head of an image file says.

    Attributes:
        file_format: Pillow's name of it.
        mode: Pillow's name of how pixels are stored.
        pixels: Width times height.
        turned: Whether EXIF data say that it is shown in another way than it is stored.
        sixteen_bit: Whether a channel has 16 bits.
        transparent: Whether some of it may be.
        several_frames: Whether it has more than one.
        progressive: Whether it is a JPEG in several scans.
    """

    file_format: str
    mode: str
    pixels: int
    turned: bool
    sixteen_bit: bool
    transparent: bool
    several_frames: bool
    progressive: bool

    @property
    def is_grey(self) -> bool:
        """Whether it is stored without colour."""
        return self.mode in ("1", "L", "LA", "La", "I") or self.mode.startswith("I;16")


def read_header(content: Content) -> Header | None:
    """Read the head of an image file; None if there is none that can be read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(content)) as image:
                return _header(image, content)
    except Image.DecompressionBombError:
        return Header("", "", LARGEST_PIXELS + 1, False, False, False, False, False)  # noqa: FBT003
    except Exception:  # noqa: BLE001 (Pillow's plugins raise anything)
        return None


def _header(image: Image.Image, content: Content) -> Header:
    file_format = image.format or ""
    return Header(
        file_format=file_format,
        mode=image.mode,
        pixels=image.width * image.height,
        turned=_orientation(image) in range(2, 9),
        sixteen_bit=_is_sixteen_bit(image, content),
        transparent=image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info,
        several_frames=bool(getattr(image, "is_animated", False)),  # not every plugin has it, says Pillow
        progressive=file_format in ("JPEG", "MPO") and bool(image.info.get("progressive")),
    )


def _orientation(image: Image.Image) -> object:
    if isinstance(image, TiffImageFile):
        return image.tag_v2.get(_ORIENTATION)
    try:
        # Asked of the base class: the PNG plugin would decode the image first.
        return Image.Image.getexif(image).get(_ORIENTATION)
    except Exception:  # noqa: BLE001 (EXIF data of any kind of damage; a run does not mind it either)
        return None


def _is_sixteen_bit(image: Image.Image, content: Content) -> bool:
    if image.format == "PNG":
        return content[24] == 16  # the bit depth in IHDR; Pillow has made 8 bits of coloured ones
    if isinstance(image, TiffImageFile):
        bits = image.tag_v2.get(_BITS_PER_SAMPLE, (8,))
        return 16 in (bits if isinstance(bits, tuple) else (bits,))
    return image.mode.startswith("I")


def mismatch(name: str, header: Header) -> str | None:
    """Say which format a file has, if its name says another."""
    extension = name.rpartition(".")[2].lower()
    said = any(extension in names for names in _EXTENSIONS.values())
    if not said or extension in _EXTENSIONS.get(header.file_format, ()):
        return None
    return f"{header.file_format} content"


def lacks_its_end(content: Content) -> bool:
    """Whether a JPEG has no end-of-image marker behind its pixels."""
    whole = bytes(content)
    if whole.endswith(_JPEG_END):
        return False
    position = len(_JPEG_START)
    while (marker := _JPEG_MARKER.search(whole, position)) is not None:
        if marker[0] == _JPEG_END:
            return False
        # Every other marker leads a segment that says how long it is; what lies in it is no marker.
        begin = marker.end()
        position = begin + max(int.from_bytes(whole[begin : begin + 2], "big"), 2)
    return True


def cause(content: Content, reason: str) -> tuple[str, str]:
    """Why a file cannot be decoded: the kind of finding, and what to say of it.

    Args:
        content: The file.
        reason: What the decoder says.
    """
    if len(content) == 0:
        return "empty_file", ""
    header = read_header(content)
    if header is not None and header.pixels > LARGEST_PIXELS:
        return "too_large", reason
    if "no fixed range" in reason:
        return "no_fixed_range", reason
    head = bytes(content[:512])
    if header is None and not head.startswith(_BEGINNINGS):
        return "not_an_image", _looks_like(head) or reason
    return ("truncated" if _is_cut_off(content, reason) else "corrupt"), "" if header is None else reason


def _is_cut_off(content: Content, reason: str) -> bool:
    head, tail = bytes(content[:12]), bytes(content[-64:])
    if head.startswith(b"\x89PNG"):
        return b"IEND" not in tail
    if head.startswith(_JPEG_START):
        return lacks_its_end(content)
    if head.startswith(b"RIFF"):
        return len(content) < 8 + int.from_bytes(head[4:8], "little")
    return any(word in reason.lower() for word in ("truncat", "premature", "end of file", "not enough"))


def _looks_like(head: bytes) -> str:
    for beginning, name in _OTHERS:
        if head.startswith(beginning):
            return name
    if head.lstrip().lower().startswith(_HTML):
        return "a web page"
    if head[4:8] == b"ftyp":
        return f"a {head[8:12].decode('ascii', 'replace').strip()} file (HEIC, AVIF or a video)"
    return ""
