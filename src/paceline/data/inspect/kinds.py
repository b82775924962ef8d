"""What can be found in a set of images, how bad is each, and what is to be done about it?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.data.image.decode import LARGEST_PIXELS

Severity = Literal["breaks", "spoils", "costs", "notice"]

SEVERITIES: dict[Severity, str] = {
    "breaks": "a run stops at it, or leaves it out as broken",
    "spoils": "a run goes on, but what it learns or scores is not what it seems",
    "costs": "the same pictures could be read in less time, or trained on in fewer steps",
    "notice": "handled, and perhaps not meant",
}

# Against the square that the model sees.
LARGE = 64
SMALL = 4
LONG = 5
IMBALANCED = 10
FEW = 10


@dataclass(frozen=True)
class Kind:
    """One thing that can be found.

    Attributes:
        name: What it is called in JSON.
        severity: How bad it is.
        means: What it is.
        advice: What to do.
    """

    name: str
    severity: Severity
    means: str
    advice: str


_AGAIN = "copy or download it again, or remove it"

# What one sample can be; the order is that of the bits in a row's traits, and of the report.
OF_SAMPLES = (
    Kind("broken_link", "breaks", "it leads to a file that is not there", "restore what it points to, or remove it"),
    Kind("not_permitted", "breaks", "this user may not read it", "allow it (chmod a+r), or train as its owner"),
    Kind("empty_file", "breaks", "it has no content", _AGAIN),
    Kind("not_an_image", "breaks", "no image in a format that can be read", "convert or remove it"),
    Kind("truncated", "breaks", "it ends before its last pixel", _AGAIN),
    Kind("corrupt", "breaks", "it is damaged inside", _AGAIN),
    Kind("too_large", "breaks", f"it has more than {LARGEST_PIXELS:,} pixels", "shrink it"),
    Kind("no_fixed_range", "breaks", "32-bit or signed numbers, whose range is unknown", "store unsigned 8 or 16 bits"),
    Kind("unreadable", "breaks", "it cannot be read for another reason", "repair or remove it"),
    Kind("reader_died", "breaks", "the process that read it ended", "remove it, and tell us: a decoder crashed"),
    Kind("unfinished", "spoils", "a JPEG without an end, whose last part is made up", _AGAIN),
    Kind(
        "large",
        "costs",
        f"over {LARGE} times the pixels that the model sees",
        "shrink it once: most of the decoding is for pixels that nobody sees",
    ),
    Kind("progressive", "costs", "a JPEG in several scans, which decodes slowly", "encode it as a baseline JPEG once"),
    Kind(
        "extreme_ratio",
        "costs",
        f"one side is over {LONG} times the other",
        "crop it: a square shows little of it, and resizing it takes much memory",
    ),
    Kind(
        "tiny",
        "notice",
        f"a side is under 1/{SMALL} of what the model sees",
        "see whether it is a thumbnail or an icon; a smaller data.image_size costs less",
    ),
    Kind("flat_end", "notice", "its lower part is one flat colour, as of a damaged file", f"look at it; {_AGAIN}"),
    Kind("wrong_extension", "notice", "its name says another format; it is read all the same", "rename it"),
    Kind("cmyk", "notice", "stored for print; converted without a colour profile", "convert it, if colours matter"),
    Kind(
        "sixteen_bit", "notice", "16 bits per channel; the upper 8 are used", "scale it, if it uses the lower ones only"
    ),
    Kind(
        "transparent", "notice", "partly transparent; laid over white", "lay it over another colour, if that is better"
    ),
    Kind("palette", "notice", "at most 256 colours", "take a better original, if there is one"),
    Kind("several_frames", "notice", "the first frame is used", "extract the frames, if others matter"),
    Kind("turned", "notice", "turned or mirrored as its EXIF data say", "see whether all programs that wrote it agree"),
    Kind("grey_among_colour", "notice", "without colour, and others are not", "see whether grey tells the class"),
    Kind("colour_among_grey", "notice", "in colour, and seen in grey", "set data.channels=3, if colour matters"),
)

OF_SETS = (
    Kind("layout", "breaks", "a run refuses the folder", "do what each sentence says"),
    Kind("leak", "spoils", "it is in another split too: a score on it says nothing", "remove it from one of them"),
    Kind(
        "near_leak",
        "spoils",
        "it looks the same as one in another split",
        "look at both; if they are one picture, remove it from one of the splits",
    ),
    Kind("contradiction", "spoils", "it is in two classes", "keep it in the class it belongs to"),
    Kind("duplicate", "costs", "a copy of another in its split and class", "keep one"),
    Kind(
        "imbalance",
        "notice",
        f"the largest class has over {IMBALANCED} times the images of the smallest",
        "look at the score of each class, not of all together",
    ),
    Kind("small_class", "notice", f"fewer than {FEW} training images", "collect more, or merge classes"),
    Kind(
        "no_held_out",
        "notice",
        "no held-out image of the class: no score says anything about it",
        "add held-out images, or training images to hold some out of",
    ),
    Kind("alike_names", "notice", "classes whose names differ by case or space only", "merge them, if they are one"),
    Kind("unread", "notice", "in the folder, and not read by a run", "move it, if it was meant to be read"),
)

KINDS = {kind.name: kind for kind in (*OF_SAMPLES, *OF_SETS)}
BIT = {kind.name: 1 << number for number, kind in enumerate(OF_SAMPLES)}
BROKEN = sum(BIT[kind.name] for kind in OF_SAMPLES if kind.severity == "breaks")
