"""Is this file a plain JPEG, of which every decoder makes the same picture, and how large is it?

Told by its markers alone, in some tens of microseconds. What is not plain (turned by EXIF, CMYK, arithmetic coding,
several pictures in one file, cut off or damaged, no JPEG at all) is left to `decode.py`, which knows what to make of
it, or what is wrong with it.

ISO/IEC 10918-1, annex B, names the markers.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from PIL import Image

from paceline.data.image.decode import LARGEST_PIXELS, ORIENTATION
from paceline.data.image.source import Content
from paceline.data.image.transforms import Shape

_BEGIN, _END = b"\xff\xd8", b"\xff\xd9"
_FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended and progressive, all with Huffman's codes
_OTHER_FRAMES = (0xC3, *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0))
_SCAN = 0xDA
_EXIF_SEGMENT, _SEVERAL_SEGMENT, _ADOBE_SEGMENT = 0xE1, 0xE2, 0xEE
# Tables, restart intervals, scans, what applications say and comments: all that may stand between two scans.
_BETWEEN_SCANS = (0xC4, 0xDB, 0xDD, _SCAN, *range(0xE0, 0xF0), 0xFE)
_MARKER: re.Pattern[bytes] = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")  # but for those that restart a scan
_LUMA_CHROMA = (1, 2, 3)


class _Frame(NamedTuple):
    precision: int
    height: int
    width: int
    components: tuple[int, ...]


def plain_jpeg(content: Content) -> Shape | None:
    """Height and width of a plain JPEG file, or None for any other content.

    Args:
        content: The whole file.
    """
    if len(content) < len(_BEGIN + _END) or content[:2] != _BEGIN or content[-2:] != _END:
        return None
    size = None
    at = len(_BEGIN)
    while at + 4 <= len(content) and content[at] == 0xFF:
        marker = content[at + 1]
        if marker == 0xFF:  # filling
            at += 1
            continue
        if marker == _SCAN:
            return size if _only_scans_follow(content, at) else None
        end = at + 2 + _length(content, at)
        segment = content[at + 4 : end]
        if marker in _FRAMES and size is None:
            size = _plain_size(_frame(segment))
        elif marker in _FRAMES + _OTHER_FRAMES or _may_change_the_picture(marker, bytes(segment)):
            return None
        at = end
    return None


def _length(content: Content, at: int) -> int:
    """What the segment whose marker is at ``at`` says of its length."""
    return content[at + 2] << 8 | content[at + 3]


def _only_scans_follow(content: Content, at: int) -> bool:
    """Whether the file goes on with scans, and what may stand between them, to the end; ``at`` is its first scan.

    Bytes of 255 that a scan itself holds are followed by a zero. A marker among them that does not belong there is
    damage, which some decoders stumble over and others do not.
    """
    while (found := _MARKER.search(content, at)) is not None:
        at = found.start()
        if content[at + 1] not in _BETWEEN_SCANS or at + 4 > len(content):
            return at == len(content) - len(_END)
        at += 2 + _length(content, at)
    return False


def _frame(segment: Content) -> _Frame | None:
    if len(segment) < 6 or len(segment) < 6 + 3 * segment[5]:
        return None
    components = tuple(segment[6 + 3 * index] for index in range(segment[5]))
    return _Frame(segment[0], segment[1] << 8 | segment[2], segment[3] << 8 | segment[4], components)


def _plain_size(frame: _Frame | None) -> Shape | None:
    if frame is None or frame.precision != 8:
        return None
    # Other names of components may mean other colours; no height is told behind the picture.
    if len(frame.components) != 1 and frame.components != _LUMA_CHROMA:
        return None
    return (frame.height, frame.width) if 0 < frame.height * frame.width <= LARGEST_PIXELS else None


def _may_change_the_picture(marker: int, segment: bytes) -> bool:
    """Whether a segment of an application says that the samples are not the upright picture."""
    if marker == _EXIF_SEGMENT:
        return _is_turned(segment)
    if marker == _SEVERAL_SEGMENT:
        return segment.startswith(b"MPF\0")
    # Adobe's last byte tells how colours were transformed: 0 not at all, 1 to luma and chroma.
    return marker == _ADOBE_SEGMENT and segment.startswith(b"Adobe") and segment[11:12] != b"\x01"


def _is_turned(segment: bytes) -> bool:
    if not segment.startswith(b"Exif\0"):
        return b"Orientation" in segment  # in XMP, which is XML
    exif = Image.Exif()
    try:
        exif.load(segment)
        return bool(exif.get(ORIENTATION, 1) != 1)
    except Exception:  # noqa: BLE001 (metadata of any kind of damage; the other decoder says what they say)
        return True
