"""What is to be known about one sample? It is read as a run reads it, and described in a few bytes."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline.data.image.source import BrokenImageError, Content, EncodedSource, SampleSource, encoded_source
from paceline.data.inspect.header import Header, cause, lacks_its_end, mismatch, read_header
from paceline.data.inspect.kinds import LARGE, LONG, SMALL

Pixels = NDArray[np.uint8]

# A million samples are described in 72 MB.
ROW = np.dtype(
    [
        ("height", "i4"),
        ("width", "i4"),
        ("file_bytes", "i8"),
        ("seconds", "f4"),  # of processor time, to decode it
        ("traits", "u4"),
        ("content", "u8", (2,)),  # digest of the file, or of the pixels where there is none
        ("hash", "u8"),  # of how it looks; 0: too little to see
        ("mean", "f4", (3,)),
        ("square", "f4", (3,)),
    ]
)
Rows = np.ndarray[tuple[int], np.dtype[np.void]]
Defect = tuple[str, str]
"""The kind, and what more there is to say."""

_SAMPLED = 64  # pixels per side that mean and deviation are taken of
_SMALLEST = 32  # pixels per side; what is smaller looks alike too easily
_FLAT_PART = 10  # of so many parts of an image, the last
_BLACK, _WHITE = 8, 247  # of 255: what a picture's margin may well be
_FLAT = 8  # of 255: between the darkest and the brightest of 72 parts


@dataclass(frozen=True)
class Viewer:
    """What a sample is held against.

    Attributes:
        image_size: Height and width that the model sees.
        channels: What images are decoded to.
        has_files: Whether the source is one of image files (:func:`encoded_source`).
    """

    image_size: int
    channels: int
    has_files: bool


def look(source: SampleSource, sample: int, viewer: Viewer, row: np.void) -> list[Defect]:
    """Describe a sample in ``row``, of ``ROW``, and return what there is to say about it.

    Nothing is raised for what is wrong with the sample; its row then stays as it is.
    """
    where = source.path(sample)
    begin = time.thread_time()
    try:
        image = source.read(sample)
    except BrokenImageError as error:
        return [_broken_link(where) or _broken(source, sample, error)]
    except Exception as error:  # noqa: BLE001 (a source of one's own may raise anything; a run would stop)
        return [("unreadable", f"{type(error).__name__}: {error}")]
    row["seconds"] = time.thread_time() - begin
    # Asked once per source: to see whether an object follows a protocol takes as long as to read a file's head.
    content = cast("EncodedSource", source).encoded(sample) if viewer.has_files else None
    _measure(image, content, row)
    header = None if content is None else read_header(content)
    return [*_of_header(where, header, content), *_of_pixels(image, header, viewer)]


def _broken_link(where: str) -> Defect | None:
    """What a link says that leads nowhere; None for everything else."""
    if not os.path.islink(where) or os.path.exists(where):
        return None
    return "broken_link", f"to {os.readlink(where)}"


def _broken(source: SampleSource, sample: int, error: BrokenImageError) -> Defect:
    if isinstance(error.__cause__, PermissionError):
        return "not_permitted", error.reason
    files = encoded_source(source)
    if files is None:
        return "unreadable", error.reason
    try:
        return cause(files.encoded(sample), error.reason)
    except BrokenImageError as unreadable:
        return "unreadable", unreadable.reason


def _measure(image: Pixels, content: Content | None, row: np.void) -> None:
    height, width, channels = image.shape
    row["height"], row["width"] = height, width
    row["file_bytes"] = image.nbytes if content is None else len(content)
    digest = hashlib.blake2b(image.tobytes() if content is None else content, digest_size=16)
    row["content"] = np.frombuffer(digest.digest(), dtype=np.uint64)
    row["hash"] = look_hash(image)
    sampled = _thinned(image).transpose(2, 0, 1).reshape(channels, -1) / np.float32(255)
    row["mean"][:channels] = sampled.mean(axis=1)
    row["square"][:channels] = np.square(sampled).mean(axis=1)


def _thinned(image: Pixels) -> Pixels:
    height, width = image.shape[:2]
    return image[:: -(-height // _SAMPLED), :: -(-width // _SAMPLED)]


def look_hash(image: Pixels) -> int:
    """64 bits that stay nearly the same when an image is resized or encoded anew: the difference hash.

    Each bit says whether one of 8x8 parts is brighter than its right neighbour (Krawetz, "Kind of Like That", 2013).
    0 for what shows too little: an image that is small or of one shade.
    """
    if min(image.shape[:2]) < _SMALLEST:
        return 0
    parts = grey_parts(image, 9, 8).astype(np.int16)
    if parts.max() - parts.min() < _FLAT:
        return 0
    bits = np.packbits(parts[:, 1:] > parts[:, :-1])
    return int.from_bytes(bits.tobytes(), "big")


def grey_parts(image: Pixels, width: int, height: int) -> Pixels:
    """An image cut into ``width`` x ``height`` parts, and the mean brightness of each, uint8 [height, width]."""
    # Of a large image some pixels are enough: 24 along each side of a part.
    step = max(min(image.shape[0] // (24 * height), image.shape[1] // (24 * width)), 1)
    some = np.ascontiguousarray(image[::step, ::step])
    whole = Image.fromarray(some[:, :, 0] if some.shape[2] == 1 else some)
    # The gap lets Pillow add up whole blocks of pixels first, which is fast. Triangles, because Pillow's boxes end at
    # whole pixels: a part would be cut elsewhere in a resized copy.
    return np.asarray(whole.resize((width, height), Image.Resampling.BILINEAR, reducing_gap=4.0).convert("L"))


def _of_header(where: str, header: Header | None, content: Content | None) -> Iterator[Defect]:
    if header is None or content is None:
        return
    if (other := mismatch(where, header)) is not None:
        yield "wrong_extension", other
    if header.file_format in ("JPEG", "MPO") and lacks_its_end(content):
        yield "unfinished", ""
    facts = {
        "progressive": header.progressive,
        "cmyk": header.mode == "CMYK",
        "sixteen_bit": header.sixteen_bit,
        "transparent": header.transparent,
        "palette": header.mode in ("P", "PA"),
        "several_frames": header.several_frames,
        "turned": header.turned,
    }
    yield from ((name, "") for name, holds in facts.items() if holds)


def _of_pixels(image: Pixels, header: Header | None, viewer: Viewer) -> Iterator[Defect]:
    height, width = image.shape[:2]
    said = f"{width}x{height}"
    if height * width > LARGE * viewer.image_size**2:
        yield "large", said
    if min(height, width) * SMALL < viewer.image_size:
        yield "tiny", said
    if max(height, width) > LONG * min(height, width):
        yield "extreme_ratio", said
    if (rows := _flat_rows(image)) * _FLAT_PART >= height:
        yield "flat_end", f"the last {rows} of {height} rows"
    if viewer.channels == 3 and _is_grey(image):
        yield "grey_among_colour", ""
    if viewer.channels == 1 and header is not None and not header.is_grey:
        yield "colour_among_grey", header.mode


def _flat_rows(image: Pixels) -> int:
    """How many rows at the end of an image are of one colour that is neither black nor white; 0 if all are.

    Decoders fill so what is missing of a JPEG, and it stays when the picture is saved anew.
    """
    colour = image[-1, 0]
    if colour.min() < _BLACK or colour.max() > _WHITE or (image[-1] != colour).any():
        return 0
    differing = np.flatnonzero((image != colour).any(axis=(1, 2)))
    return len(image) - 1 - int(differing[-1]) if len(differing) else 0


def _is_grey(image: Pixels) -> bool:
    thin = _thinned(image)
    return bool((thin == thin[:, :, :1]).all())
