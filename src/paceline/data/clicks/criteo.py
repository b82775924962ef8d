"""How is Criteo's text read? Each line has a label, 13 numbers and 26 categories, between tabs.

All but the label may be missing. Of a number x the logarithm of 1 + x is taken, of one below 0, or missing, that of 1,
as DLRM's authors do. A category is 32 bits in hexadecimal, and becomes a row of its feature's table by a hash that is
written down here; row 0 is for what is missing.
"""

from __future__ import annotations

import codecs
import gzip
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
_LONGEST = 8  # hexadecimal digits
_IN_NUMBERS = b"-0123456789"  # Python would also take blanks, underscores and a plus

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
    split = [line.rstrip(b"\r\n").split(b"\t") for line in lines]
    if not has_label:
        split = [[b"0", *fields] for fields in split]
    try:
        return _parsed(split), []
    except ValueError:
        return _one_by_one(split, path, first)


def table_rows_of(rows: Rows, tables: tuple[int, ...]) -> NDArray[np.int64]:
    """Which row of each feature's table a sample's categories are, int64 [N, 26]: 0 where missing, else
    ``1 + hash(feature, category) mod (rows - 1)``.
    """
    values = rows["categories"].astype(np.uint64)
    features = np.arange(1, CATEGORIES + 1, dtype=np.uint64)
    hashed = _mixed(values + (features << np.uint64(32)))
    found = (1 + hashed % (np.asarray(tables, dtype=np.uint64) - np.uint64(1))).astype(np.int64)
    found[missing_of(rows)] = 0
    return found


def missing_of(rows: Rows) -> NDArray[np.bool_]:
    """Which categories are missing, [N, 26]."""
    return (rows["missing"][:, None] >> np.arange(CATEGORIES, dtype=np.uint32)) & np.uint32(1) > 0


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014): 64 bits to 64 bits, the same on every machine for ever."""
    words = words * np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def opened(path: Path) -> gzip.GzipFile | BinaryIO:
    """A file of lines, packed or not; raises DataError if it is a pipe or a device."""
    refuse_odd_kinds(path)
    return gzip.open(path) if has_ending(path.name, ("gz",)) else open(path, "rb")


def _one_by_one(split: list[list[bytes]], path: str, first: int) -> tuple[Rows, list[WrongLine]]:
    good, wrong = [], []
    for number, fields in enumerate(split, start=first):
        try:
            good.append(_parsed([fields]))
        except ValueError as error:
            wrong.append(WrongLine(path, number, str(error)))
    return np.concatenate(good) if good else np.empty(0, dtype=ROW), wrong


def _parsed(split: list[list[bytes]]) -> Rows:
    """Lines as samples.

    Raises:
        ValueError: If any is wrong; of a single one it says why.
    """
    for fields in split:
        if len(fields) != _FIELDS:
            raise ValueError(f"found {len(fields)} fields between tabs, but there must be {_FIELDS}")
    rows = np.zeros(len(split), dtype=ROW)
    rows["label"] = _labels([fields[0] for fields in split])
    numbers = [field for fields in split for field in fields[1 : 1 + DENSE]]
    rows["dense"] = _numbers(numbers).reshape(-1, DENSE)
    categories = [field for fields in split for field in fields[1 + DENSE :]]
    values, missing = _hexadecimal(categories)
    rows["categories"] = values.reshape(-1, CATEGORIES)
    bits = missing.reshape(-1, CATEGORIES).astype(np.uint32) << np.arange(CATEGORIES, dtype=np.uint32)
    rows["missing"] = bits.sum(axis=1, dtype=np.uint32)
    return rows


def _labels(fields: list[bytes]) -> NDArray[np.uint32]:
    found = np.array([field == b"1" for field in fields], dtype=np.uint32)
    wrong = next((field for field in fields if field not in (b"0", b"1")), None)
    if wrong is not None:
        raise ValueError(f"found the label {_shown(wrong)}, but it must be 0 or 1")
    return found


def _numbers(fields: list[bytes]) -> NDArray[np.float32]:
    """log(1 + x), 0 for what is missing or below 0."""
    try:
        if b"".join(fields).translate(None, _IN_NUMBERS):
            raise ValueError
        values = np.array([int(field) if field else 0 for field in fields], dtype=np.int64)
    except (ValueError, OverflowError):
        wrong = next(field for field in fields if field and not _is_whole(field))
        raise ValueError(f"found {_shown(wrong)} among the {DENSE} numbers, but each must be a whole one") from None
    return np.log1p(np.maximum(values, 0).astype(np.float64)).astype(np.float32)


def _is_whole(field: bytes) -> bool:
    try:
        return not field.translate(None, _IN_NUMBERS) and abs(int(field)) < 2**63
    except ValueError:
        return False


def _hexadecimal(fields: list[bytes]) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    """Values, and which of them are missing."""
    # Python would also take a sign, blanks and underscores.
    if not b"".join(fields).isalnum() or max(map(len, fields)) > _LONGEST:
        wrong = next((field for field in fields if field and not _is_category(field)), None)
        if wrong is not None:
            raise _no_category(wrong)
    try:
        values = [int(field, 16) if field else 0 for field in fields]
    except ValueError:
        raise _no_category(next(field for field in fields if field and not _is_category(field))) from None
    return np.array(values, dtype=np.uint32), np.array([not field for field in fields], dtype=bool)


def _is_category(field: bytes) -> bool:
    return len(field) <= _LONGEST and all(digit in b"0123456789abcdefABCDEF" for digit in field)


def _no_category(field: bytes) -> ValueError:
    return ValueError(
        f"found {_shown(field)} among the {CATEGORIES} categories, but each must be up to {_LONGEST} hexadecimal digits"
    )


def _shown(field: bytes) -> str:
    text = field.decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= 20 else f"{text[:20]}…")
