"""Names of whole image files whose kind is not read, so that these are not called damaged."""

from __future__ import annotations

import io
import re

from PIL import TiffImagePlugin, features

_BEGINNINGS = (
    (rb"\xff\x0a|\0\0\0\x0cJXL ", "a JPEG XL image"),
    (rb"....ftypcrx|FUJIFILMCCD-RAW|IIR[OS]|MMOR|IIU\0", "a camera's raw image"),
    (rb"II\xbc", "a JPEG XR image"),
    (rb"v/1\x01", "an OpenEXR image"),
    (rb"#\?RADIANCE|#\?RGBE", "a Radiance HDR image"),
    (rb".{128}DICM", "a DICOM image"),
    (rb"8BPS\0\x02", "a large Photoshop document (PSB)"),
    (rb"gimp xcf", "a GIMP image (XCF)"),
    (rb"\s*(<\?xml[^<]*)?(<!--.*?-->\s*|<!DOCTYPE svg[^<]*)?<svg", "a vector graphic (SVG)"),
)
_OPTIONAL = (
    (rb"....ftypavi[fs]", "avif", "an AVIF image, which this Pillow cannot read,"),
    (rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51", "jpg_2000", "a JPEG 2000 image, which this Pillow cannot read,"),
)
# By the number of the start-of-frame marker; libjpeg reads 0 to 2, and mostly 9 and 10.
_JPEG_PROCESSES = {
    **dict.fromkeys((0xC3, 0xCB), "a lossless JPEG"),
    **dict.fromkeys((0xC5, 0xC6, 0xC7, 0xCD, 0xCE, 0xCF), "a hierarchical JPEG"),
    0xF7: "a JPEG-LS image",
}
_JPEG_SEGMENT = re.compile(rb"\xff+([\xc0-\xfe])")
_NOT_FRAMES = (0xC4, 0xC8, 0xCC)
_NUMBERS = {2: "-bit signed numbers", 3: "-bit floating-point numbers"}
_BITS, _COMPRESSION, _CHANNELS, _PLANES, _FORMAT = 258, 259, 277, 284, 339
_PIXELS = (273, 324)  # positions of strips or tiles
_OLD_JPEG = 6
_OF_PILLOW = re.compile(r"unsupported|not supported|not available|unknown raw mode", re.IGNORECASE)


def unsupported_kind(content: bytes, error: str = "") -> str:
    """Name the kind of an image file that is not read though its header is whole; empty if it is none such.

    Args:
        content: The file; of one that is not a TIFF, the beginning suffices.
        error: The decoder's message, if it was tried.
    """
    for pattern, name in _BEGINNINGS:
        if re.match(pattern, content, re.DOTALL | re.IGNORECASE):
            return name
    for pattern, feature, name in _OPTIONAL:
        if re.match(pattern, content, re.DOTALL):
            return "" if features.check(feature) else name
    if content.startswith(b"\xff\xd8"):
        return _jpeg_kind(content, failed=bool(error))
    if error and content[:2] in (b"II", b"MM") and (kind := _tiff_kind(content, error)):
        return kind
    return f"an image of this kind ({error})" if _OF_PILLOW.search(error) else ""


def _jpeg_kind(content: bytes, *, failed: bool) -> str:
    """Name the process of a JPEG that is not baseline, extended or progressive with 8 bits and 1, 3 or 4 channels."""
    position = 2
    while (found := _JPEG_SEGMENT.match(content, position)) is not None:
        marker, position = found[1][0], found.end()
        if (0xC0 <= marker <= 0xCF and marker not in _NOT_FRAMES) or marker == 0xF7:
            bits, channels = content[position + 2 : position + 3], content[position + 7 : position + 8]
            if not channels:
                break
            if marker in _JPEG_PROCESSES or bits[0] != 8:
                return f"{_JPEG_PROCESSES.get(marker, 'a JPEG')} of {bits[0]} bits"
            if channels[0] not in (1, 3, 4):
                return f"a JPEG of {channels[0]} channels"
            return "an arithmetic-coded JPEG" if failed and marker in (0xC9, 0xCA) else ""
        position += int.from_bytes(content[position : position + 2], "big")
    return ""


def _tiff_kind(content: bytes, error: str) -> str:
    """Name what is unusual in the tags of a TIFF that Pillow did not read; empty if they are not readable."""
    try:
        tags = TiffImagePlugin.ImageFileDirectory_v2(content[: 16 if content[2:3] == b"+" else 8])
        file = io.BytesIO(content)
        file.seek(tags.next)
        tags.load(file)
        values = {tag: tags.get(tag, 1) for tag in (_BITS, _COMPRESSION, _CHANNELS, _FORMAT)}
        bits, compression, channels, kind = (each[0] if isinstance(each, tuple) else each for each in values.values())
        has_pixels = any(tag in tags for tag in _PIXELS)
    except Exception:  # noqa: BLE001 (Pillow's parser raises anything at damaged tags)
        return ""
    if compression not in TiffImagePlugin.COMPRESSION_INFO or compression == _OLD_JPEG:
        return f"a TIFF of compression {compression}"
    # Pillow does not identify a file with an unknown combination of tags.
    if not has_pixels or not (_OF_PILLOW.search(error) or "identif" in error):
        return ""
    return f"a TIFF with {channels} channel{'s' * (channels != 1)} of {bits}{_NUMBERS.get(kind, ' bits')}"


def plane_fault(tags: TiffImagePlugin.ImageFileDirectory_v2, *, is_negative: bool) -> str:
    """Name channels stored one after another in a TIFF in a way that Pillow reads wrongly without an error."""
    bits, channels, compression = tags.get(_BITS, (1,)), tags.get(_CHANNELS, 1), tags.get(_COMPRESSION, 1)
    depth = max(bits) if isinstance(bits, tuple) else bits
    wrong = depth not in (1, 8) or (depth == 8 and channels == 1 and is_negative) if compression == 1 else channels == 2
    if tags.get(_PLANES, 1) != 2 or not wrong:
        return ""
    return f"a TIFF of {depth} bits with its channels one after another (PlanarConfiguration 2)"
