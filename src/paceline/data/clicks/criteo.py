"""Criteo's text: each line has a label, 13 numbers and 26 categories, between tabs.

All but the label may be missing. Of a number x the logarithm of 1 + x is taken, of one below 0, or missing, that of 1,
as DLRM's authors do. A category is 32 bits in hexadecimal, and becomes a row of its feature's table by a hash that is
written down here; row 0 is for what is missing.
"""

from __future__ import annotations

import codecs
import gzip
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError
from paceline.files import LeftOut, files_below, has_ending, refuse_odd_kinds

DENSE, CATEGORIES = 13, 26
_FIELDS = 1 + DENSE + CATEGORIES
ENDINGS = ("tsv", "txt", "gz")
_LINES_AT_ONCE = 16_384
# Python itself would also take blanks, underscores and a plus.
_NUMBER, _CATEGORY = rb"(?:-?0*[0-9]{1,18})?", rb"[0-9a-fA-F]{0,8}"
_LINE = re.compile(rb"[01]" + (rb"\t" + _NUMBER) * DENSE + (rb"\t" + _CATEGORY) * CATEGORIES)

ROW = np.dtype([("label", "<u4"), ("missing", "<u4"), ("dense", "<f4", (DENSE,)), ("categories", "<u4", (CATEGORIES,))])
"""A sample as it is stored: its missing categories are bits of `missing`, the first feature's the lowest."""

Rows = NDArray[np.void]

UNREADABLE = (OSError, EOFError, zlib.error)
"""What reading a file of lines raises; a gzip file that is cut off the second, and a damaged one any of them."""


@dataclass(frozen=True)
class WrongLine:
    """A line that is none of Criteo's.

    Attributes:
        path: Its file.
        number: Its number there, from 1.
        reason: What is wrong with it.
    """

    path: str
    number: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}, line {self.number}: {self.reason}"


def click_files(path: Path, left_out: LeftOut) -> list[Path]:
    """Return the files of a split, in order: a file itself, or those below a folder.

    Raises:
        DataError: If there are none.
    """
    if not path.is_dir():
        return [path]
    found = []
    for name in files_below(path, left_out):
        if has_ending(name, ENDINGS):
            found.append(path / name)
        else:
            left_out.add(f"files that do not end in .{', .'.join(ENDINGS)}", str(path / name))
    if not found:
        raise DataError(f"'{path}' holds no file in Criteo's format; its name ends in .{', .'.join(ENDINGS)}.")
    return found


def read_blocks(path: Path) -> Iterator[tuple[Rows, list[WrongLine]]]:
    """The samples of a file, some thousand at a time, and the lines among them that are wrong.

    Raises:
        DataError: If the file cannot be read.
    """
    first = 1
    try:
        with opened(path) as file:
            while lines := file.readlines(_LINES_AT_ONCE * 200):
                yield parse(lines, str(path), first)
                first += len(lines)
    except UNREADABLE as error:
        raise DataError(f"'{path}' cannot be read after line {first - 1}: {error}; restore it.") from error


def parse(lines: list[bytes], path: str, first: int = 1, *, has_label: bool = True) -> tuple[Rows, list[WrongLine]]:
    """Samples of some lines, those that are wrong left out and named.

    Args:
        lines: With or without their ends.
        path: Where they come from.
        first: Number of the first one.
        has_label: Whether a line begins with a label.
    """
    if first == 1 and lines:
        lines = [lines[0].removeprefix(codecs.BOM_UTF8), *lines[1:]]
    good, wrong = [], []
    for number, line in enumerate(lines, start=first):
        whole = line.rstrip(b"\r\n") if has_label else b"0\t" + line.rstrip(b"\r\n")
        if _LINE.fullmatch(whole):
            good.append(whole.split(b"\t"))
        else:
            wrong.append(WrongLine(path, number, _fault(whole.split(b"\t"))))
    rows = np.zeros(len(good), dtype=ROW)
    rows["label"] = [fields[0] == b"1" for fields in good]
    numbers = [[int(field or b"0") for field in fields[1 : 1 + DENSE]] for fields in good]
    categories = [[int(field or b"0", 16) for field in fields[1 + DENSE :]] for fields in good]
    missing = [[not field for field in fields[1 + DENSE :]] for fields in good]
    # log(1 + x), 0 for what is missing or below 0.
    rows["dense"] = np.log1p(np.maximum(np.array(numbers, dtype=np.int64).reshape(-1, DENSE), 0).astype(np.float64))
    rows["categories"] = np.array(categories, dtype=np.uint32).reshape(-1, CATEGORIES)
    bits = np.array(missing, dtype=np.uint32).reshape(-1, CATEGORIES) << np.arange(CATEGORIES, dtype=np.uint32)
    rows["missing"] = bits.sum(axis=1, dtype=np.uint32)
    return rows, wrong


def _fault(fields: list[bytes]) -> str:
    """What is wrong with a line that is not Criteo's."""
    if len(fields) != _FIELDS:
        return f"found {len(fields)} fields between tabs, but there must be {_FIELDS}"
    if fields[0] not in (b"0", b"1"):
        return f"found the label {_shown(fields[0])}, but it must be 0 or 1"
    for field in fields[1 : 1 + DENSE]:
        if not re.fullmatch(_NUMBER, field):
            return f"found {_shown(field)} among the {DENSE} numbers, but each must be a whole one of up to 18 digits"
    field = next(field for field in fields[1 + DENSE :] if not re.fullmatch(_CATEGORY, field))
    return f"found {_shown(field)} among the {CATEGORIES} categories, but each must be up to 8 hexadecimal digits"


def table_rows_of(rows: Rows, tables: tuple[int, ...]) -> NDArray[np.int64]:
    """Which row of each feature's table a sample's categories are, int64 [N, 26]: 0 where missing, else
    ``1 + hash(feature, category) mod (rows - 1)``.
    """
    values = rows["categories"].astype(np.uint64)
    features = np.arange(1, CATEGORIES + 1, dtype=np.uint64)
    # SplitMix64's finaliser (Steele, Lea and Flood 2014): 64 bits to 64 bits, the same on every machine for ever.
    words = (values + (features << np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    words = words ^ (words >> np.uint64(31))
    found = (1 + words % (np.asarray(tables, dtype=np.uint64) - np.uint64(1))).astype(np.int64)
    found[missing_of(rows)] = 0
    return found


def missing_of(rows: Rows) -> NDArray[np.bool_]:
    """Which categories are missing, [N, 26]."""
    return (rows["missing"][:, None] >> np.arange(CATEGORIES, dtype=np.uint32)) & np.uint32(1) > 0


def opened(path: Path) -> gzip.GzipFile | BinaryIO:
    """A file of lines, packed or not; raises DataError if it is a pipe or a device."""
    refuse_odd_kinds(path)
    return gzip.open(path) if has_ending(path.name, ("gz",)) else open(path, "rb")


def _shown(field: bytes) -> str:
    text = field.decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= 20 else f"{text[:20]}…")
