"""Folders of images: one in which nothing is wrong, and one in which everything is."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

PER_CLASS = 12


def picture(seed: int, size: tuple[int, int] = (96, 80), *, detail: int = 12) -> Image.Image:
    """Soft spots of colour, each seed its own."""
    spots = np.random.default_rng(seed).integers(0, 256, (detail, detail, 3), dtype=np.uint8)
    return Image.fromarray(spots).resize(size, Image.Resampling.BICUBIC)


def encoded(image: Image.Image, file_format: str = "JPEG", **options: Any) -> bytes:
    """The content of a file that holds the image."""
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def put(path: Path, content: bytes) -> str:
    """Write a file, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path)


def _clean(root: Path) -> Path:
    seed = 0
    for split, count in (("train", PER_CLASS), ("val", 3)):
        for label in ("cat", "dog"):
            for number in range(count):
                put(root / split / label / f"{number:02}.jpg", encoded(picture(seed), quality=90))
                seed += 1
    return root


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    """A folder in which nothing is wrong."""
    return _clean(tmp_path / "clean")


def _broken_files() -> dict[str, tuple[str, bytes]]:
    """Kind of finding and content, by name."""
    jpeg, png = encoded(picture(1000)), encoded(picture(1001), "PNG")
    middle = len(png) // 2
    damaged = bytes(byte ^ 0x55 for byte in png[middle : middle + 40])
    return {
        "empty.jpg": ("empty_file", b""),
        "words.jpg": ("not_an_image", b"these are words, and no picture"),
        "page.jpg": ("not_an_image", b"<!DOCTYPE html><html>404</html>"),
        "pointer.jpg": ("not_an_image", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        "phone.jpg": ("unsupported", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100)),
        "cut.jpg": ("truncated", jpeg[: len(jpeg) // 2]),
        "last.jpg": ("truncated", jpeg[:-2]),
        "cut.png": ("truncated", png[:middle]),
        "barely.png": ("truncated", png[:20]),
        "bits.png": ("corrupt", png[:middle] + damaged + png[middle + 40 :]),
        "huge.png": ("too_large", _huge_png()),
        "float.tif": ("no_fixed_range", encoded(picture(1002).convert("F"), "TIFF")),
    }


def _huge_png() -> bytes:
    """12,000 x 8,000 pixels of one bit each, in a few kilobytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    head = (12_000).to_bytes(4, "big") + (8_000).to_bytes(4, "big") + bytes([1, 0, 0, 0, 0])
    rows = zlib.compress(bytes((12_000 // 8 + 1) * 8_000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def _turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(picture(1010), exif=exif)


def _odd_files() -> dict[str, tuple[str, bytes]]:
    """Kind of finding and content, by name: what can be read."""
    jpeg = encoded(picture(1011), quality=90)
    grey = np.arange(80 * 96, dtype=np.uint16).reshape(80, 96) * 8
    frames = [picture(seed) for seed in (1012, 1013)]
    see_through = picture(1014).convert("RGBA")
    see_through.putalpha(100)
    return {
        "no-end.jpg": ("unfinished", jpeg[: len(jpeg) * 9 // 10] + bytes(20_000)),
        "half.jpg": ("flat_end", encoded(picture(1023), quality=90)[: len(jpeg) // 2] + b"\xff\xd9"),
        "large.jpg": ("large", encoded(picture(1015, (2200, 1600)))),
        "scans.jpg": ("progressive", encoded(picture(1016), progressive=True)),
        "long.png": ("extreme_ratio", encoded(picture(1017, (600, 60)), "PNG")),
        "tiny.png": ("tiny", encoded(picture(1018, (40, 50)), "PNG")),
        "other.jpg": ("wrong_extension", encoded(picture(1019), "PNG")),
        "print.jpg": ("cmyk", encoded(picture(1020).convert("CMYK"))),
        "deep.png": ("sixteen_bit", encoded(Image.fromarray(grey), "PNG")),
        "glass.png": ("transparent", encoded(see_through, "PNG")),
        "few.png": ("palette", encoded(picture(1021).convert("P"), "PNG")),
        "film.gif": ("several_frames", encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])),
        "lying.jpg": ("turned", _turned()),
        "grey.jpg": ("grey_among_colour", encoded(picture(1022).convert("L"))),
    }


@pytest.fixture
def plant_broken(clean: Path) -> Callable[[], dict[str, set[str]]]:
    """Put a file of every kind that a run cannot read into the clean folder; return their paths by kind."""

    def plant() -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for name, (kind, content) in _broken_files().items():
            found.setdefault(kind, set()).add(put(clean / "train" / "cat" / name, content))
        link = clean / "val" / "dog" / "link.jpg"
        link.symlink_to("nowhere.jpg")
        return found | {"broken_link": {str(link)}}

    return plant


@pytest.fixture
def bad(clean: Path, plant_broken: Callable[[], dict[str, set[str]]]) -> tuple[Path, dict[str, set[str]]]:
    """A folder in which everything is wrong, and what by kind."""
    found = plant_broken()
    for name, (kind, content) in _odd_files().items():
        found.setdefault(kind, set()).add(put(clean / "train" / "dog" / name, content))
    found["palette"].add(str(clean / "train" / "dog" / "film.gif"))
    found["grey_among_colour"].add(str(clean / "train" / "dog" / "deep.png"))
    os.mkfifo(clean / "train" / "cat" / "pipe.jpg")
    original = (clean / "train" / "dog" / "00.jpg").read_bytes()
    small = picture(PER_CLASS + 1).resize((72, 60), Image.Resampling.BICUBIC)  # of train/dog/01.jpg
    train, val = clean / "train", clean / "val"
    found |= {
        "duplicate": {put(train / "dog" / "copy.jpg", original)},
        "contradiction": {put(train / "fox" / "dog.jpg", (train / "dog" / "02.jpg").read_bytes())},
        "leak": {put(val / "cat" / "seen.jpg", (train / "cat" / "03.jpg").read_bytes())},
        "near_leak": {put(val / "dog" / "small.jpg", encoded(small, quality=60))},
    }
    put(train / "fox" / "1.jpg", encoded(picture(1100)))
    put(val / "fox" / "1.jpg", encoded(picture(1101)))
    put(train / "cat" / "notes.txt", b"words")
    put(train / "cat" / "phone.heic", b"no picture")
    for split in (train, val):
        (split / "gnu").mkdir()
    put(train / "cat" / "more" / "1.jpg", encoded(picture(1102)))
    put(train / "eel" / "1.jpg", encoded(picture(1103)))
    put(clean / "extra" / "1.jpg", encoded(picture(1104)))
    put(clean / "README.md", b"words")
    put(clean / "train" / "cat" / ".hidden.jpg", encoded(picture(1105)))
    put(clean / "test" / "cat" / "unseen.jpg", encoded(picture(1106)))
    found["leak"].add(put(clean / "test" / "dog" / "seen.jpg", (train / "dog" / "04.jpg").read_bytes()))
    return clean, found
