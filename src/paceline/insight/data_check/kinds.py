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
        means: What it is, as the end of "so many files …".
        advice: What to do.
    """

    name: str
    severity: Severity
    means: str
    advice: str


_AGAIN = "copy or download it again, or remove it"

# What one sample can be; the order is that of the bits in a row's traits, and of the report.
OF_SAMPLES = (
    Kind("broken_link", "breaks", "link to a file that is not there", "restore what it points to, or remove the link"),
    Kind("not_permitted", "breaks", "may not be read by this user", "allow it (chmod a+r), or train as their owner"),
    Kind("empty_file", "breaks", "have no content", _AGAIN),
    Kind("not_an_image", "breaks", "are no image in a format that can be read", "convert or remove them"),
    Kind("truncated", "breaks", "end before their last pixel", _AGAIN),
    Kind("corrupt", "breaks", "are damaged inside", _AGAIN),
    Kind("too_large", "breaks", f"have more than {LARGEST_PIXELS:,} pixels", "shrink them"),
    Kind("no_fixed_range", "breaks", "store 32 bits per pixel, whose range nobody knows", "store 8 or 16 bits"),
    Kind("unreadable", "breaks", "cannot be read", "read the reason; repair or remove them"),
    Kind("reader_died", "breaks", "ended the process that read them", "remove them, and report it: a decoder crashed"),
    Kind("unfinished", "spoils", "are JPEGs whose end is missing: part of the picture is made up", _AGAIN),
    Kind(
        "large",
        "costs",
        f"have over {LARGE} times the pixels that the model sees",
        "shrink them once (paceline pack --max-side): most of the decoding is for pixels that nobody sees",
    ),
    Kind("progressive", "costs", "are progressive JPEGs, which decode slowly", "encode them as baseline JPEGs once"),
    Kind(
        "extreme_ratio",
        "costs",
        f"are over {LONG} times as long as wide, or the reverse",
        "crop them: a square shows little of them, and resizing them takes much memory",
    ),
    Kind(
        "tiny",
        "notice",
        f"have a side under 1/{SMALL} of what the model sees",
        "see whether they are thumbnails or icons; a smaller data.image_size costs less",
    ),
    Kind(
        "wrong_extension",
        "notice",
        "hold another format than their name says",
        "rename them; they are read all the same",
    ),
    Kind(
        "cmyk",
        "notice",
        "are stored for print (CMYK)",
        "convert them to RGB with their colour profile, if colours matter",
    ),
    Kind(
        "sixteen_bit",
        "notice",
        "store 16 bits per channel, of which the upper 8 are used",
        "nothing, if 8 bits are enough",
    ),
    Kind(
        "transparent",
        "notice",
        "are partly transparent, and are laid over white",
        "lay them over what you want, if not white",
    ),
    Kind("palette", "notice", "have a palette of at most 256 colours", "nothing, unless better originals exist"),
    Kind(
        "several_frames",
        "notice",
        "hold several frames, of which the first is used",
        "extract the frames, if others matter",
    ),
    Kind(
        "turned",
        "notice",
        "are turned or mirrored by their EXIF data, as a run does too",
        "nothing; other programs may show them lying",
    ),
    Kind("grey_among_colour", "notice", "are grey, and most others are not", "see whether grey tells the class"),
    Kind(
        "colour_among_grey",
        "notice",
        "are in colour, and will be seen in grey",
        "set data.channels=3, if colour matters",
    ),
)

OF_SETS = (
    Kind("layout", "breaks", "things about the folder that a run refuses", "do what each sentence says"),
    Kind(
        "leak",
        "spoils",
        "are also in another split: a score on them is no score",
        "remove them from one of the splits",
    ),
    Kind(
        "near_leak",
        "spoils",
        "look the same as one in another split",
        "look at each pair; remove those that are one picture from one of the splits",
    ),
    Kind("contradiction", "spoils", "are in several classes at once", "keep each in the class it belongs to"),
    Kind("duplicate", "costs", "are copies of another in the same split and class", "keep one of each"),
    Kind(
        "imbalance",
        "notice",
        f"classes of which the largest is over {IMBALANCED} times the smallest",
        "look at the score of each class, not of all",
    ),
    Kind(
        "small_class",
        "notice",
        f"classes with fewer than {FEW} training images",
        "collect more, or merge classes",
    ),
    Kind(
        "no_held_out",
        "notice",
        "classes without a held-out image: no score says anything about them",
        "add held-out images, or training images to hold some out of",
    ),
    Kind("alike_names", "notice", "class names that differ by case or space only", "merge them, if they are one class"),
    Kind(
        "unread", "notice", "entries in the folder that a run does not read", "move them, if they were meant to be read"
    ),
)

KINDS = {kind.name: kind for kind in (*OF_SAMPLES, *OF_SETS)}
BIT = {kind.name: 1 << number for number, kind in enumerate(OF_SAMPLES)}
BROKEN = sum(BIT[kind.name] for kind in OF_SAMPLES if kind.severity == "breaks")
