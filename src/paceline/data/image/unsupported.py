"""Names of unsupported kinds of JPEG and TIFF files, so that intact files are not called damaged."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any

from PIL import TiffImagePlugin

UNSUPPORTED = "is not supported: convert it, for example to a PNG of 8 bits"

# By the number of the start-of-frame marker; libjpeg reads 0 to 2, and mostly 9 and 10.
_JPEGS = {
    **dict.fromkeys((0xC0, 0xC1, 0xC2), "a JPEG"),
    **dict.fromkeys((0xC3, 0xCB), "a lossless JPEG"),
    **dict.fromkeys((0xC5, 0xC6, 0xC7, 0xCD, 0xCE, 0xCF), "a hierarchical JPEG"),
    **dict.fromkeys((0xC9, 0xCA), "an arithmetic-coded JPEG"),
    0xF7: "a JPEG-LS image",
}
_SEGMENT = re.compile(rb"\xff+([\xc0-\xfe])(..)(.?)....(.?)", re.DOTALL)
_BITS, _COMPRESSION, _CHANNELS, _PLANES, _FORMAT = 258, 259, 277, 284, 339
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
        values = [tags.get(tag, 1) for tag in (_COMPRESSION, _CHANNELS, _BITS, _FORMAT)]
        compression, channels, bits, numbers = (each[0] if isinstance(each, tuple) else each for each in values)
        has_pixels = any(tag in tags for tag in _PIXELS)
    except Exception:  # noqa: BLE001 (Pillow's parser raises anything at damaged tags)
        return ""
    if compression not in TiffImagePlugin.COMPRESSION_INFO or compression == _OLD_JPEG:
        return f"a TIFF of compression {compression}"
    is_known = has_pixels and _OF_PILLOW.search(error)
    return f"a TIFF of {channels} channel(s) of {bits}{_NUMBERS.get(numbers, ' bits')}" if is_known else ""


def plane_fault(tags: Mapping[int, Any], *, is_negative: bool) -> str:
    """Name channels stored one after another in a TIFF in a way that Pillow reads wrongly without an error."""
    bits, channels, compression = tags.get(_BITS, (1,)), tags.get(_CHANNELS, 1), tags.get(_COMPRESSION, 1)
    depth = max(bits) if isinstance(bits, tuple) else bits
    wrong = depth not in (1, 8) or (depth == 8 and channels == 1 and is_negative) if compression == 1 else channels == 2
    if tags.get(_PLANES, 1) != 2 or not wrong:
        return ""
    return f"a TIFF of {depth} bits with its channels one after another (PlanarConfiguration 2)"
