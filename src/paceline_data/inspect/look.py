"""Describe one sample in a few bytes, read as in a run, and name its defects."""

from __future__ import annotations

import hashlib
import io
import os
import re
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.TiffImagePlugin import TiffImageFile

from paceline.data.image import file_checks
from paceline.data.image.decode import NEEDS_HEIF, guess_format
from paceline.data.image.pillow_pixels import LARGEST_PIXELS, UNSUPPORTED
from paceline.data.image.source import BrokenImageError, Content, EncodedSource, SampleSource, encoded_source

Severity = Literal["breaks", "spoils", "costs", "notice"]

SEVERITIES: dict[Severity, str] = {
    "breaks": "a run stops at it, or leaves it out as broken",
    "spoils": "a run continues, but learns or scores something else than it seems to",
    "costs": "the same pictures could be read in less time, or trained on in fewer steps",
    "notice": "handled, but perhaps not intended",
}

# Relative to the model's square input.
LARGE = 64
SMALL = 4
LONG = 5
IMBALANCED = 10
FEW = 10


@dataclass(frozen=True)
class Kind:
    """A kind of finding.

    Attributes:
        name: Name in JSON.
        severity: Severity.
        means: Meaning.
        advice: Advice.
    """

    name: str
    severity: Severity
    means: str
    advice: str


_AGAIN = "copy or download it again, or remove it"

# Kinds of findings about a sample, in the order of the trait bits in a row and of the report.
OF_SAMPLES = (
    Kind("broken_link", "breaks", "its target does not exist", "restore what it points to, or remove it"),
    Kind("not_permitted", "breaks", "this user may not read it", "allow it (chmod a+r), or train as its owner"),
    Kind("empty_file", "breaks", "it has no content", _AGAIN),
    Kind("not_an_image", "breaks", "not an image in a supported format", "convert or remove it"),
    Kind("unsupported", "breaks", "an image of a kind that is not read", "convert it, for example to a PNG of 8 bits"),
    Kind("truncated", "breaks", "it ends before its last pixel", _AGAIN),
    Kind("corrupt", "breaks", "its content is damaged", _AGAIN),
    Kind("too_large", "breaks", f"it has more than {LARGEST_PIXELS:,} pixels", "shrink it"),
    Kind("no_fixed_range", "breaks", "32-bit or signed numbers, whose range is unknown", "store unsigned 8 or 16 bits"),
    Kind("unreadable", "breaks", "it cannot be read for another reason", "repair or remove it"),
    Kind("reader_died", "breaks", "the process that read it ended", "remove it, and tell us: a decoder crashed"),
    Kind("unfinished", "spoils", "a JPEG without an end, whose last part the decoder fills in", _AGAIN),
    Kind(
        "large",
        "costs",
        f"over {LARGE} times the pixels that the model sees",
        "shrink it once: most decoded pixels are thrown away",
    ),
    Kind("progressive", "costs", "a JPEG in several scans, which decodes slowly", "encode it as a baseline JPEG once"),
    Kind(
        "extreme_ratio",
        "costs",
        f"one side is over {LONG} times the other",
        "crop it: a square crop shows little of it",
    ),
    Kind(
        "tiny",
        "notice",
        f"a side is under 1/{SMALL} of what the model sees",
        "check whether it is a thumbnail or an icon; a smaller data.image_size costs less",
    ),
    Kind("flat_end", "notice", "its lower part is one flat colour, as of a damaged file", f"look at it; {_AGAIN}"),
    Kind("wrong_extension", "notice", "its extension is of another format; it is read anyway", "rename it"),
    Kind(
        "cmyk", "notice", "stored for print (CMYK); converted without a colour profile", "convert it, if colours matter"
    ),
    Kind(
        "sixteen_bit", "notice", "16 bits per channel; the upper 8 are used", "scale it, if it uses the lower ones only"
    ),
    Kind(
        "transparent",
        "notice",
        "partly transparent; placed on white",
        "use another background colour, if that is better",
    ),
    Kind("palette", "notice", "at most 256 colours", "use a better original, if there is one"),
    Kind("several_frames", "notice", "the first frame is used", "extract the other frames, if they matter"),
    Kind(
        "turned",
        "notice",
        "rotated or mirrored as its EXIF data says",
        "check that all programs that wrote the images agree",
    ),
    Kind(
        "grey_among_colour",
        "notice",
        "greyscale, while others have colour",
        "check whether being grey predicts the class",
    ),
    Kind("colour_among_grey", "notice", "in colour, but read as greyscale", "set data.channels=3, if colour matters"),
)

OF_SETS = (
    Kind("layout", "breaks", "a run refuses the folder", "follow the advice in each message"),
    Kind("other_file", "breaks", "not an image, and in a class folder", "convert it, or move it away"),
    Kind("heic_image", "breaks", "pillow-heif reads it", "pip install 'paceline[heic]', or convert it"),
    Kind("special_file", "breaks", "neither a file nor a link to one: reading it may block for ever", "remove it"),
    Kind("nested_folder", "breaks", "in a class folder, where only images are read", "move its images up, or it away"),
    Kind("empty_folder", "breaks", "a class folder without an image", "put images there, or remove it"),
    Kind("unread_folder", "breaks", "next to train/, and neither val/ nor test/", "rename it, or move it away"),
    Kind("leak", "spoils", "it is in another split too, so scores are too high", "move it away (--quarantine DIR)"),
    Kind(
        "near_leak",
        "spoils",
        "it looks the same as one in another split",
        "look at both; if they are one picture, remove it from one of the splits",
    ),
    Kind("contradiction", "spoils", "it is in two classes", "keep it in the class it belongs to"),
    Kind(
        "unlabelled",
        "spoils",
        "it has no label or object, and looks the same as an image that has",
        "label it, or remove it",
    ),
    Kind("duplicate", "costs", "a copy of another in its split and class", "keep one"),
    Kind(
        "imbalance",
        "notice",
        f"the largest class has over {IMBALANCED} times the images of the smallest",
        "look at the score of each class, not the overall score",
    ),
    Kind("small_class", "notice", f"fewer than {FEW} training images", "collect more, or merge classes"),
    Kind(
        "no_held_out",
        "notice",
        "no held-out image of the class, so it is not scored",
        "add held-out images, or training images to hold some out of",
    ),
    Kind("implausible", "notice", "annotations that may be wrong", "look at the first ones; correct or convert them"),
    Kind(
        "listed_names",
        "notice",
        "a class whose name looks like a list",
        "if an image has several labels, set task=image_multilabel and separate them by ';'",
    ),
    Kind("alike_names", "notice", "names that differ in case, spaces or invisible characters", "merge them, if one"),
    Kind("unread", "notice", "in the folder, and not read by a run", "move it, if it should be read"),
)

KINDS = {kind.name: kind for kind in (*OF_SAMPLES, *OF_SETS)}
BIT = {kind.name: 1 << number for number, kind in enumerate(OF_SAMPLES)}
BROKEN = sum(BIT[kind.name] for kind in OF_SAMPLES if kind.severity == "breaks")


_ORIENTATION = 0x0112
_BITS_PER_SAMPLE = 258
_JPEG_START, _JPEG_END = b"\xff\xd8", b"\xff\xd9"
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # any marker outside the pixel data
_EXTENSIONS = {
    "BMP": ("bmp",),
    "DIB": ("bmp",),
    "GIF": ("gif",),
    "JPEG": ("jpg", "jpeg"),
    "MPO": ("jpg", "jpeg"),  # a JPEG followed by further pictures
    "PNG": ("png",),
    "PPM": ("ppm",),
    "TIFF": ("tif", "tiff"),
    "WEBP": ("webp",),
}
_BEGINNINGS = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM", b"RIFF", b"II*\0", b"MM\0*", b"P6", b"P5")


@dataclass(frozen=True, kw_only=True)
class Header:
    """Facts from the header of an image file.

    Attributes:
        file_format: Pillow's name of the format.
        mode: Pillow's name of the pixel mode.
        pixels: Width times height.
        turned: Whether EXIF data rotate or mirror it.
        sixteen_bit: Whether a channel has 16 bits.
        transparent: Whether it may be transparent.
        several_frames: Whether it has several frames.
        progressive: Whether it is a progressive JPEG.
    """

    file_format: str = ""
    mode: str = ""
    pixels: int
    turned: bool = False
    sixteen_bit: bool = False
    transparent: bool = False
    several_frames: bool = False
    progressive: bool = False

    @property
    def is_grey(self) -> bool:
        """Whether it is stored without colour."""
        return self.mode in ("1", "L", "LA", "La", "I") or self.mode.startswith("I;16")


def read_header(content: Content) -> Header | None:
    """Read the header of an image file; None if it is unreadable."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(content)) as image:
                file_format = image.format or ""
                return Header(
                    file_format=file_format,
                    mode=image.mode,
                    pixels=image.width * image.height,
                    turned=_orientation(image) in range(2, 9),
                    sixteen_bit=_is_sixteen_bit(image, content),
                    transparent=image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info,
                    several_frames=bool(getattr(image, "is_animated", False)),  # not in every plugin (Pillow's docs)
                    progressive=file_format in ("JPEG", "MPO") and bool(image.info.get("progressive")),
                )
    except Image.DecompressionBombError:
        return Header(pixels=LARGEST_PIXELS + 1)
    except Exception:  # noqa: BLE001 (Pillow's plugins raise anything)
        return None


def _orientation(image: Image.Image) -> object:
    if isinstance(image, TiffImageFile):
        return image.tag_v2.get(_ORIENTATION)
    try:
        # Calls the base class: the PNG plugin would decode the image first.
        return Image.Image.getexif(image).get(_ORIENTATION)
    except Exception:  # noqa: BLE001 (EXIF data of any kind of damage; a run does not mind it either)
        return None


def _is_sixteen_bit(image: Image.Image, content: Content) -> bool:
    if image.format == "PNG":
        return content[24] == 16  # the bit depth in IHDR; Pillow converts coloured images to 8 bits
    if isinstance(image, TiffImageFile):
        bits = image.tag_v2.get(_BITS_PER_SAMPLE, (8,))
        return 16 in (bits if isinstance(bits, tuple) else (bits,))
    return image.mode.startswith("I")


def is_truncated(content: Content) -> bool:
    """Whether a JPEG lacks an end-of-image marker after its pixels."""
    data = bytes(content)
    if data.endswith(_JPEG_END):
        return False
    position = len(_JPEG_START)
    while (marker := _JPEG_MARKER.search(data, position)) is not None:
        if marker[0] == _JPEG_END:
            return False
        # Every other marker starts a segment with a length; bytes inside it are not markers.
        begin = marker.end()
        position = begin + max(int.from_bytes(data[begin : begin + 2], "big"), 2)
    return True


def cause(content: Content, reason: str) -> tuple[str, str]:
    """Return why a file cannot be decoded: the kind of finding and its details.

    Args:
        content: The file.
        reason: The decoder's error.
    """
    if len(content) == 0:
        return "empty_file", ""
    header = read_header(content)
    if header is not None and header.pixels > LARGEST_PIXELS:
        return "too_large", reason
    if "no fixed range" in reason:
        return "no_fixed_range", reason
    if UNSUPPORTED in reason or reason == NEEDS_HEIF:
        return "unsupported", reason.removesuffix(UNSUPPORTED).strip()
    head = bytes(content[:512])
    if header is None and not head.startswith(_BEGINNINGS):
        return "not_an_image", guess_format(head) or reason
    if head.startswith(_JPEG_START):
        is_cut_off = is_truncated(content)
    elif head.startswith((b"\x89PNG", b"RIFF")):
        is_cut_off = file_checks.is_truncated(head, bytes(content[-64:]), len(content))
    else:
        is_cut_off = any(word in reason.lower() for word in ("truncat", "premature", "end of file", "not enough"))
    return ("truncated" if is_cut_off else "corrupt"), "" if header is None else reason


Pixels = NDArray[np.uint8]

PARTS = 12  # per side

# 208 MB describe a million samples.
ROW = np.dtype(
    [
        ("height", "i4"),
        ("width", "i4"),
        ("file_bytes", "i8"),
        ("seconds", "f4"),  # CPU time to decode it
        ("traits", "u4"),
        ("content", "u8", (2,)),  # digest of the file, or of the pixels without a file
        ("parts", "u1", (PARTS**2,)),  # mean brightness of parts; 0: too little content
        ("mean", "f4", (3,)),
        ("square", "f4", (3,)),
    ]
)
Rows = np.ndarray[tuple[int], np.dtype[np.void]]
Defect = tuple[str, str]
"""The kind and its details."""

_SAMPLED = 64  # pixels per side for computing mean and standard deviation
_SMALLEST = 32  # pixels per side; smaller images look alike too easily
_FLAT_PART = 10  # the last of this number of parts of an image
_BLACK, _WHITE = 8, 247  # out of 255: plausible for a picture's margin
_FLAT = 8  # out of 255: between the darkest and the brightest part


@dataclass(frozen=True)
class Viewer:
    """The preprocessing against which a sample is checked.

    Attributes:
        image_size: Height and width of the model's input.
        channels: Channels of decoded images.
        has_files: Whether the source has image files (:func:`encoded_source`).
    """

    image_size: int
    channels: int
    has_files: bool


def look(source: SampleSource, sample: int, viewer: Viewer, row: np.void) -> list[Defect]:
    """Describe a sample in ``row``, of dtype ``ROW``, and return its findings.

    Does not raise an error for a broken sample; its row then stays unchanged.
    """
    where = source.path(sample)
    begin = time.thread_time()
    try:
        image = source.read(sample)
    except BrokenImageError as error:
        if os.path.islink(where) and not os.path.exists(where):
            return [("broken_link", f"to {os.readlink(where)}")]
        return [_broken(source, sample, error)]
    except Exception as error:  # noqa: BLE001 (a source of one's own may raise anything; a run would stop)
        return [("unreadable", f"{type(error).__name__}: {error}")]
    row["seconds"] = time.thread_time() - begin
    # Cached per source: a protocol isinstance check takes as long as reading a file's header.
    content = cast("EncodedSource", source).encoded(sample) if viewer.has_files else None
    _measure(image, content, row)
    header = None if content is None else read_header(content)
    return [*_of_header(where, header, content), *_of_pixels(image, header, viewer)]


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
    row["parts"] = look_parts(image)
    sampled = _thinned(image).transpose(2, 0, 1).reshape(channels, -1) / np.float32(255)
    row["mean"][:channels] = sampled.mean(axis=1)
    row["square"][:channels] = np.square(sampled).mean(axis=1)


def _thinned(image: Pixels) -> Pixels:
    height, width = image.shape[:2]
    return image[:: -(-height // _SAMPLED), :: -(-width // _SAMPLED)]


def look_parts(image: Pixels) -> Pixels:
    """Return the mean brightness of 12 x 12 parts, by which similar images are found, uint8 [144].

    Zeros for images with too little content: small ones and those of a single shade.
    """
    if min(image.shape[:2]) < _SMALLEST:
        return np.zeros(PARTS**2, dtype=np.uint8)
    parts = grey_parts(image, PARTS, PARTS).reshape(-1)
    return parts if int(parts.max()) - int(parts.min()) >= _FLAT else np.zeros_like(parts)


def grey_parts(image: Pixels, width: int, height: int) -> Pixels:
    """Return the mean brightness of ``width`` x ``height`` parts of an image, uint8 [height, width]."""
    # For a large image some pixels suffice: 24 along each side of a part.
    step = max(min(image.shape[0] // (24 * height), image.shape[1] // (24 * width)), 1)
    some = np.ascontiguousarray(image[::step, ::step])
    whole = Image.fromarray(some[:, :, 0] if some.shape[2] == 1 else some)
    # The reducing gap lets Pillow first average whole blocks of pixels, which is fast. Uses the triangle filter,
    # because Pillow's box filter ends at whole pixels: a part would have other edges in a resized copy.
    return np.asarray(whole.resize((width, height), Image.Resampling.BILINEAR, reducing_gap=4.0).convert("L"))


def _of_header(where: str, header: Header | None, content: Content | None) -> Iterator[Defect]:
    if header is None or content is None:
        return
    extension = where.rpartition(".")[2].lower()
    is_known = any(extension in names for names in _EXTENSIONS.values())
    if is_known and extension not in _EXTENSIONS.get(header.file_format, ()):
        yield "wrong_extension", f"{header.file_format} content"
    if header.file_format in ("JPEG", "MPO") and is_truncated(content):
        yield "unfinished", ""
    facts = {**asdict(header), "cmyk": header.mode == "CMYK", "palette": header.mode in ("P", "PA")}
    for name in ("progressive", "cmyk", "sixteen_bit", "transparent", "palette", "several_frames", "turned"):
        if facts[name]:
            yield name, ""


def _of_pixels(image: Pixels, header: Header | None, viewer: Viewer) -> Iterator[Defect]:
    height, width = image.shape[:2]
    size_text = f"{width}x{height}"
    if height * width > LARGE * viewer.image_size**2:
        yield "large", size_text
    if min(height, width) * SMALL < viewer.image_size:
        yield "tiny", size_text
    if max(height, width) > LONG * min(height, width):
        yield "extreme_ratio", size_text
    if (rows := _flat_rows(image)) * _FLAT_PART >= height:
        yield "flat_end", f"the last {rows} of {height} rows"
    sampled = _thinned(image)
    if viewer.channels == 3 and (sampled == sampled[:, :, :1]).all():
        yield "grey_among_colour", ""
    if viewer.channels == 1 and header is not None and not header.is_grey:
        yield "colour_among_grey", header.mode


def _flat_rows(image: Pixels) -> int:
    """Return the number of last rows of one colour that is neither black nor white.

    Decoders fill the missing part of a JPEG like this, and it remains when the picture is saved again. 0 if the first
    row has this colour too, since it is then a background.
    """
    colour = image[-1, 0]
    if colour.min() < _BLACK or colour.max() > _WHITE or (image[-1] != colour).any() or (image[0] == colour).all():
        return 0
    return len(image) - 1 - int(np.flatnonzero((image != colour).any(axis=(1, 2)))[-1])
