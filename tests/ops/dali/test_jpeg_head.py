"""What counts as a plain JPEG: every decoder makes the same of it. The rest is Pillow's to judge."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from paceline.data.image.decode import BrokenImageError, decode, head_of, upright_size
from paceline_ops.dali.backend import plain_jpeg


def with_bytes(content: bytes, inserted: bytes) -> bytes:
    """The file with bytes of its last scan replaced."""
    at = content.rindex(b"\xff\xda") + 40
    return content[:at] + inserted + content[at + len(inserted) :]


def jpeg(mode: str = "RGB", size: tuple[int, int] = (37, 21), **options: Any) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, **{"format": "JPEG", **options})
    return file.getvalue()


def turned(orientation: int, *, xmp: bool = False) -> bytes:
    if xmp:
        return jpeg(xmp=f'<x:xmpmeta><tiff:Orientation="{orientation}"/></x:xmpmeta>'.encode())
    exif = Image.Exif()
    exif[0x0112] = orientation
    return jpeg(exif=exif)


PLAIN = {
    "baseline": jpeg(),
    "grey": jpeg("L"),
    "progressive": jpeg(progressive=True),
    "444": jpeg(subsampling=0),
    "restarts": jpeg(restart_marker_blocks=2),
    "stuffed": with_bytes(jpeg(), b"\xff\x00"),
    "segments": jpeg(comment=b"hello", dpi=(72, 72), icc_profile=b"x" * 70_000),
    "upright": turned(1),
}
OTHERS = {
    "turned": turned(6),
    "over": turned(3),
    "xmp": turned(6, xmp=True),
    "cmyk": jpeg("CMYK"),
    "rgb": jpeg(keep_rgb=True),
    "png": jpeg(format="PNG"),
    "cut": jpeg()[:-1],
    "longer": jpeg() + b"\0",
    "head": jpeg()[:200],
    "empty": b"",
    "bare": b"\xff\xd8\xff\xd9",
    "arithmetic": jpeg().replace(b"\xff\xc0", b"\xff\xc9", 1),
    "stray": with_bytes(jpeg(), b"\xff\x51"),
    "later stray": with_bytes(jpeg(progressive=True), b"\xff\x51"),
    "two ends": with_bytes(jpeg(), b"\xff\xd9"),
}


@pytest.mark.parametrize("content", PLAIN.values(), ids=PLAIN.keys())
def test_a_plain_file_has_the_size_that_pillow_finds(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "image.jpg"
    path.write_bytes(content)
    assert plain_jpeg(content) == upright_size(path) == decode(content, 3).shape[:2] == (21, 37)
    assert plain_jpeg(memoryview(content)) == (21, 37)


def test_filling_between_segments_is_allowed() -> None:
    content = jpeg()
    assert plain_jpeg(content[:2] + b"\xff\xff" + content[2:]) == (21, 37)


@pytest.mark.parametrize("content", OTHERS.values(), ids=OTHERS.keys())
def test_anything_else_is_left_to_pillow(content: bytes) -> None:
    assert plain_jpeg(content) is None


def test_several_pictures_in_one_file_are_left_to_pillow() -> None:
    file = io.BytesIO()
    first, second = (Image.new("RGB", (8, 8), colour) for colour in ("red", "blue"))
    first.save(file, format="MPO", save_all=True, append_images=[second])
    assert plain_jpeg(file.getvalue()) is None


def test_no_damage_to_the_head_raises() -> None:
    """Each byte of a head in turn, set to each of some values: a size, or nothing."""
    content = bytearray(jpeg(exif=turned(1)[24:60]))
    for at in range(content.index(b"\xff\xda")):
        before = content[at]
        for value in (0x00, 0x01, 0xFF, before ^ 0x10):
            content[at] = value
            found = plain_jpeg(bytes(content))
            assert found is None or len(found) == 2
        content[at] = before


@pytest.mark.parametrize("side", [65_501, 65_535])
def test_sides_that_libjpeg_has_not_are_left_to_pillow(side: int) -> None:
    content = bytearray(jpeg())
    frame = content.index(b"\xff\xc0")
    content[frame + 7 : frame + 9] = side.to_bytes(2, "big")
    assert head_of(bytes(content)) is None
    with pytest.raises(BrokenImageError):
        decode(bytes(content), 3)


def test_what_is_plain_and_cut_in_the_middle_is_still_pillows_to_judge() -> None:
    content = jpeg(size=(64, 64))
    with pytest.raises(BrokenImageError):
        decode(content[: len(content) // 2], 3)
    assert plain_jpeg(content[: len(content) // 2]) is None
