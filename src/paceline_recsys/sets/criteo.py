"""Criteo's text format: each line has a label, 13 numbers and 26 categories, separated by tabs.

All but the label may be missing. A number x becomes log(1 + x), or 0 if it is negative or missing, as in DLRM's
reference code. A category is 32 bits in hexadecimal; a hash defined here maps it to a row of its feature's table. Row 0
is for missing values.

For random access, the lines are converted once to fixed-size rows, which are memory-mapped. The copy is a folder:
``rows.bin``, all samples in sequence, and ``facts.json``, which describes its source. It is written under another name
and then renamed, so it is complete or absent; one process writes it while the others wait.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import hashlib
import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np
from numpy.typing import NDArray

from paceline.data.slices import SampleIds
from paceline.errors import DataError
from paceline.host.machine import cache_folder
from paceline.host.system import lock_file
from paceline.parsing.files import SkippedItems, has_extension, list_files, refuse_special_inputs
from paceline.parsing.plain_text import load_json
from paceline_recsys.dataset import ClickRows

DENSE, CATEGORIES = 13, 26
_FIELDS = 1 + DENSE + CATEGORIES
SUFFIXES = ("tsv", "txt", "gz")
_LINES_AT_ONCE = 16_384
# Python's parser would also accept spaces, underscores and a plus sign.
_NUMBER, _CATEGORY = rb"(?:-?0*[0-9]{1,18})?", rb"[0-9a-fA-F]{0,8}"
_LINE = re.compile(rb"[01]" + (rb"\t" + _NUMBER) * DENSE + (rb"\t" + _CATEGORY) * CATEGORIES)

ROW = np.dtype([("label", "<u4"), ("missing", "<u4"), ("dense", "<f4", (DENSE,)), ("categories", "<u4", (CATEGORIES,))])
"""A stored sample: missing categories are bits of `missing`, the first feature in the lowest bit."""

Rows = NDArray[np.void]

UNREADABLE = (OSError, EOFError, zlib.error)
"""Errors from reading line files; a truncated gzip file raises the second, a damaged one any of them."""


@dataclass(frozen=True)
class LineFault:
    """A line that violates Criteo's format.

    Attributes:
        path: File of the line.
        number: Line number, from 1.
        reason: Why it is invalid.
    """

    path: str
    number: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}, line {self.number}: {self.reason}"


def click_files(path: Path, left_out: SkippedItems) -> list[Path]:
    """Return the files of a split, in order: a single file, or those below a folder.

    Raises:
        DataError: If there are none.
    """
    if not path.is_dir():
        return [path]
    files = []
    for name in list_files(path, left_out):
        if has_extension(name, SUFFIXES):
            files.append(path / name)
        else:
            left_out.add(f"files that do not end in .{', .'.join(SUFFIXES)}", str(path / name))
    if not files:
        raise DataError(
            f"'{path}' holds no file in Criteo's format; its name ends in .{', .'.join(SUFFIXES)}.", path=path
        )
    return files


def read_blocks(path: Path) -> Iterator[tuple[Rows, list[LineFault]]]:
    """Yield the samples of a file, some thousand at a time, and its invalid lines.

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
        raise DataError(f"'{path}' cannot be read after line {first - 1}: {error}; restore it.", path=path) from error


def parse(lines: list[bytes], path: str, first: int = 1, *, has_label: bool = True) -> tuple[Rows, list[LineFault]]:
    """Parse samples from lines; invalid lines are returned separately.

    Args:
        lines: Lines, with or without line ends.
        path: Their file.
        first: Number of the first line.
        has_label: Whether lines start with a label.
    """
    if first == 1 and lines:
        lines = [lines[0].removeprefix(codecs.BOM_UTF8), *lines[1:]]
    good, faults = [], []
    for number, line in enumerate(lines, start=first):
        full_line = line.rstrip(b"\r\n") if has_label else b"0\t" + line.rstrip(b"\r\n")
        if _LINE.fullmatch(full_line):
            good.append(full_line.split(b"\t"))
        else:
            faults.append(LineFault(path, number, _fault(full_line.split(b"\t"))))
    rows = np.zeros(len(good), dtype=ROW)
    rows["label"] = [fields[0] == b"1" for fields in good]
    numbers = [[int(field or b"0") for field in fields[1 : 1 + DENSE]] for fields in good]
    categories = [[int(field or b"0", 16) for field in fields[1 + DENSE :]] for fields in good]
    missing = [[not field for field in fields[1 + DENSE :]] for fields in good]
    # log(1 + x), or 0 if missing or negative.
    rows["dense"] = np.log1p(np.maximum(np.array(numbers, dtype=np.int64).reshape(-1, DENSE), 0).astype(np.float64))
    rows["categories"] = np.array(categories, dtype=np.uint32).reshape(-1, CATEGORIES)
    bits = np.array(missing, dtype=np.uint32).reshape(-1, CATEGORIES) << np.arange(CATEGORIES, dtype=np.uint32)
    rows["missing"] = bits.sum(axis=1, dtype=np.uint32)
    return rows, faults


def _fault(fields: list[bytes]) -> str:
    """Explain why a line violates Criteo's format."""
    if len(fields) != _FIELDS:
        return f"found {len(fields)} fields between tabs, but there must be {_FIELDS}"
    if fields[0] not in (b"0", b"1"):
        return f"found the label {_short(fields[0])}, but it must be 0 or 1"
    for each in fields[1 : 1 + DENSE]:
        if not re.fullmatch(_NUMBER, each):
            return f"found {_short(each)} among the {DENSE} numbers, but each must be a whole number of up to 18 digits"
    field = next(field for field in fields[1 + DENSE :] if not re.fullmatch(_CATEGORY, field))
    return f"found {_short(field)} among the {CATEGORIES} categories, but each must be up to 8 hexadecimal digits"


def table_rows_of(rows: Rows, tables: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the table row of each categorical feature, int64 [N, 26]: 0 if missing, else ``1 + hash(feature, category)
    mod (rows - 1)``.
    """
    values = rows["categories"].astype(np.uint64)
    features = np.arange(1, CATEGORIES + 1, dtype=np.uint64)
    # SplitMix64's finaliser (Steele, Lea and Flood 2014): maps 64 bits to 64 bits, identically on every machine.
    hashes = (values + (features << np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashes = hashes ^ (hashes >> np.uint64(31))
    hashed = (1 + hashes % (np.asarray(tables, dtype=np.uint64) - np.uint64(1))).astype(np.int64)
    hashed[missing_of(rows)] = 0
    return hashed


def missing_of(rows: Rows) -> NDArray[np.bool_]:
    """Return which categories are missing, [N, 26]."""
    return (rows["missing"][:, None] >> np.arange(CATEGORIES, dtype=np.uint32)) & np.uint32(1) > 0


def opened(path: Path) -> gzip.GzipFile | BinaryIO:
    """Open a line file, compressed or not; raises DataError for a pipe or a device."""
    refuse_special_inputs(path)
    return gzip.open(path) if has_extension(path.name, ("gz",)) else open(path, "rb")


def _short(field: bytes) -> str:
    text = field.decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= 20 else f"{text[:20]}…")


_VERSION = 1
_AT_ONCE = 2**20
_ROWS, _FACTS = "rows.bin", "facts.json"


@dataclass(frozen=True, kw_only=True)
class StoredClicks:
    """All samples of one split.

    Attributes:
        rows: Rows, memory-mapped.
        distinct: Distinct values of each categorical feature.
        digest: SHA-256 of the rows.
        faults: Skipped invalid lines.
        files: Source files, with the number of samples from each.
    """

    rows: Rows
    distinct: tuple[int, ...]
    digest: str
    faults: tuple[LineFault, ...]
    files: tuple[tuple[str, int], ...]


class StoredSource:
    """A range of stored samples; implements :class:`~paceline_recsys.dataset.ClickSource`."""

    def __init__(self, clicks: StoredClicks, tables: tuple[int, ...], first: int, last: int) -> None:
        """Use the samples ``first`` to ``last`` (excluded)."""
        self._clicks = clicks
        self._tables = tables
        self._first, self._last = first, last

    def __len__(self) -> int:
        return self._last - self._first

    def read(self, ids: SampleIds) -> ClickRows:
        """Return the rows from the mapped file."""
        return as_click_rows(self._clicks.rows[ids + self._first], self._tables)

    def path(self, sample: int) -> str:
        """Return its file and its index in that file."""
        number = sample + self._first
        for path, count in self._clicks.files:
            if number < count:
                return f"{path}, sample {number + 1}"
            number -= count
        raise IndexError(sample)


def as_click_rows(rows: Rows, tables: tuple[int, ...]) -> ClickRows:
    """Convert stored samples to a network's inputs."""
    return ClickRows(rows["dense"].copy(), table_rows_of(rows, tables), rows["label"].astype(np.uint8))


def load_clicks(path: Path, cache: str, left_out: SkippedItems, *, max_broken: int) -> StoredClicks:
    """Return the binary copy of a split's text, creating it if missing.

    Args:
        path: A file or a folder of files.
        cache: Folder for copies, or ``auto``.
        left_out: Called for unused files and lines.
        max_broken: Maximum number of invalid lines to skip.

    Raises:
        DataError: If more lines are invalid, or the copy does not fit on the disk.
    """
    files = click_files(path, left_out)
    sources = [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    key_facts = {"version": _VERSION, "sources": sources}
    key = hashlib.sha256(json.dumps(key_facts, sort_keys=True).encode()).hexdigest()[:16]
    folders = _cache_folders(path, cache)
    found = next((copy for folder in folders if (copy := _opened(folder / f"clicks-{key}")) is not None), None)
    if found is None:
        lock = _open_lock(folders, path, cache, key)
        folder = Path(lock.name).with_name(f"clicks-{key}")
        with lock:
            with contextlib.suppress(OSError):  # without locks, each process makes the copy, and the last one stays
                lock_file(lock)  # until no other process is creating the same copy
            if _opened(folder) is None:
                _convert(files, folder, max_broken)
        found = _opened(folder)
        if found is None:
            raise DataError(
                f"the copy of the data in '{folder}' cannot be read back; delete that folder and start again.",
                path=folder,
            )
    if len(found.faults) > max_broken:
        raise _too_many(found.faults, max_broken)
    for each in found.faults:
        left_out.add("wrong lines", f"line {each.number} of {each.path}")
    return found


def _opened(folder: Path) -> StoredClicks | None:
    try:
        facts: dict[str, Any] = load_json((folder / _FACTS).read_text(encoding="utf-8"))
        rows = _mapped(folder / _ROWS, facts["samples"])
        if len(rows) != facts["samples"]:
            return None
        return StoredClicks(
            rows=rows,
            distinct=tuple(facts["distinct"]),
            digest=facts["digest"],
            faults=tuple(LineFault(**each) for each in facts["wrong"]),
            files=tuple((path, count) for path, count in facts["files"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _mapped(path: Path, samples: int) -> Rows:
    # An empty file cannot be mapped.
    return np.memmap(path, dtype=ROW, mode="r") if samples else np.empty(0, dtype=ROW)


def _convert(files: list[Path], folder: Path, max_broken: int) -> None:
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent, suffix=".tmp", ignore_cleanup_errors=True) as scratch:
            partial = Path(scratch, folder.name)
            partial.mkdir()  # unlike its parent, as readable for others as the user's other folders
            facts = _convert_lines(files, partial / _ROWS, max_broken)
            (partial / _FACTS).write_text(json.dumps(facts), encoding="utf-8")
            shutil.rmtree(folder, ignore_errors=True)  # a damaged copy
            os.replace(partial, folder)
    except OSError as error:
        raise DataError(
            f"the binary copy of the data cannot be written to '{folder.parent}' ({error}); it takes "
            f"{ROW.itemsize} bytes for each line: free some space, or set data.recommendation.cache to a folder with "
            f"enough."
        ) from error


def _convert_lines(files: list[Path], target: Path, max_broken: int) -> dict[str, Any]:
    digest = hashlib.sha256()
    line_faults: list[LineFault] = []
    counts: list[tuple[str, int]] = []
    with open(target, "wb") as output:
        for file in files:
            count = 0
            for rows, faults in read_blocks(file):
                line_faults += faults
                if len(line_faults) > max_broken:
                    raise _too_many(line_faults, max_broken)
                content = rows.tobytes()
                output.write(content)
                digest.update(content)
                count += len(rows)
            counts.append((str(file), count))
        output.flush()
        os.fsync(output.fileno())
    samples = sum(count for _, count in counts)
    return {
        "samples": samples,
        "distinct": _distinct(_mapped(target, samples)),
        "digest": digest.hexdigest(),
        "wrong": [asdict(each) for each in line_faults],
        "files": counts,
    }


def _distinct(rows: Rows) -> list[int]:
    """Count the distinct values of each categorical feature."""
    distinct = [np.empty(0, dtype=np.uint32)] * CATEGORIES
    for begin in range(0, len(rows), _AT_ONCE):
        part = rows[begin : begin + _AT_ONCE]
        present, values = ~missing_of(part), part["categories"]
        distinct = [np.union1d(each, values[present[:, column], column]) for column, each in enumerate(distinct)]
    return [len(each) for each in distinct]


def _too_many(faults: tuple[LineFault, ...] | list[LineFault], max_broken: int) -> DataError:
    first, *rest = faults
    more = f", and {len(rest)} more" if rest else ""
    return DataError(
        f"{first}{more}; data.max_broken={max_broken} lets {max_broken or 'no'} line(s) be left out: correct the file, "
        "or raise it."
    )


def _cache_folders(path: Path, cache: str) -> tuple[Path, ...]:
    """Return the folders that may hold the copy, the preferred one first."""
    if cache != "auto":
        return (Path(cache).expanduser(),)
    return (path if path.is_dir() else path.parent) / ".paceline", cache_folder()


def _open_lock(folders: tuple[Path, ...], path: Path, cache: str, key: str) -> TextIO:
    """Open the lock of a copy, in the first folder that can be written; creates both if needed.

    Raises:
        DataError: If there is none.
    """
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            return open(folder / f"lock-{key}", "w", encoding="utf-8")
    raise DataError(
        f"a binary copy of '{path}' is needed, and neither '{folders[0]}' nor '{folders[-1]}' can be written; set "
        "data.recommendation.cache to a folder that can."
        if cache == "auto"
        else f"data.recommendation.cache={cache} cannot be written; give a folder that can."
    )
