"""How are millions of lines of text read in any order? They are made rows of one size, once, and those are mapped.

The copy lies in a folder of its own: ``rows.bin``, all samples one after the other, and ``facts.json``, which says what
they were made of. It is made under another name and then renamed, so that it is whole or not there; of several
processes one makes it while the others wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.clicks.criteo import (
    CATEGORIES,
    ROW,
    Rows,
    WrongLine,
    click_files,
    missing_of,
    read_blocks,
    table_rows_of,
)
from paceline.data.clicks.source import ClickRows
from paceline.data.slices import SampleIds
from paceline.errors import DataError
from paceline.files import LeftOut
from paceline.machine import cache_folder
from paceline.plain_json import load_json

_VERSION = 1
_AT_ONCE = 2**20
_ROWS, _FACTS, _LOCK = "rows.bin", "facts.json", "lock"


@dataclass(frozen=True, kw_only=True)
class StoredClicks:
    """All samples of one split.

    Attributes:
        rows: Mapped from the file.
        distinct: Values of each categorical feature.
        digest: SHA-256 of the rows.
        wrong: The lines that were left out.
        files: The text's files, and how many samples the copy has of each.
    """

    rows: Rows
    distinct: tuple[int, ...]
    digest: str
    wrong: tuple[WrongLine, ...]
    files: tuple[tuple[str, int], ...]

    def line(self, sample: int) -> str:
        """Where a sample comes from, for people: its file, and its number among the samples of it."""
        for path, count in self.files:
            if sample < count:
                return f"{path}, sample {sample + 1}"
            sample -= count
        raise IndexError(sample)


class StoredSource:
    """A range of stored samples; satisfies :class:`~paceline.data.clicks.source.ClickSource`."""

    def __init__(self, clicks: StoredClicks, tables: tuple[int, ...], first: int, last: int) -> None:
        """Take the samples ``first`` to ``last`` (excluded)."""
        self._clicks = clicks
        self._tables = tables
        self._first, self._last = first, last

    def __len__(self) -> int:
        return self._last - self._first

    def read(self, ids: SampleIds) -> ClickRows:
        """The rows, from the mapped file."""
        return as_click_rows(self._clicks.rows[ids + self._first], self._tables)

    def name(self, sample: int) -> str:
        """Its file, and its place there."""
        return self._clicks.line(sample + self._first)


def as_click_rows(rows: Rows, tables: tuple[int, ...]) -> ClickRows:
    """Stored samples as a network takes them."""
    return ClickRows(rows["dense"].copy(), table_rows_of(rows, tables), rows["label"].astype(np.uint8))


def stored(path: Path, cache: str, left_out: LeftOut, *, max_broken: int) -> StoredClicks:
    """The binary copy of a split's text, made now if there is none.

    Args:
        path: A file, or a folder of them.
        cache: Folder for copies, or ``auto``.
        left_out: Told of files and lines that are not used.
        max_broken: Wrong lines that may be left out.

    Raises:
        DataError: If more lines are wrong, or there is no room for the copy.
    """
    files = click_files(path, left_out)
    sources = [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    made_of = {"version": _VERSION, "sources": sources}
    key = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:16]
    folder = _cache_folder(path, cache) / f"clicks-{key}"
    found = _opened(folder)
    if found is None:
        with _alone(folder.parent, f"{_LOCK}-{key}"):
            found = _opened(folder)  # another process may have made it meanwhile
            if found is None:
                _convert(files, folder, max_broken)
                found = _opened(folder)
    if found is None:
        raise DataError(f"the copy of the data in '{folder}' cannot be read back; delete that folder and start again.")
    if len(found.wrong) > max_broken:
        raise _too_many(found.wrong, max_broken)
    for each in found.wrong:
        left_out.add("wrong lines", f"line {each.number} of {each.path}")
    return found


def _opened(folder: Path) -> StoredClicks | None:
    try:
        facts: dict[str, Any] = load_json((folder / _FACTS).read_text(encoding="utf-8"))
        rows: Rows = np.memmap(folder / _ROWS, dtype=ROW, mode="r") if facts["samples"] else np.empty(0, dtype=ROW)
        if len(rows) != facts["samples"]:
            return None
        return StoredClicks(
            rows=rows,
            distinct=tuple(facts["distinct"]),
            digest=facts["digest"],
            wrong=tuple(WrongLine(**each) for each in facts["wrong"]),
            files=tuple((path, count) for path, count in facts["files"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _convert(files: list[Path], folder: Path, max_broken: int) -> None:
    partial = Path(tempfile.mkdtemp(dir=folder.parent, suffix=".tmp"))
    try:
        facts = _written(files, partial / _ROWS, max_broken)
        (partial / _FACTS).write_text(json.dumps(facts), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one
        os.replace(partial, folder)
    except OSError as error:
        raise DataError(
            f"the binary copy of the data cannot be written to '{folder.parent}' ({error}); it takes "
            f"{ROW.itemsize} bytes for each line: make room, or set data.recommendation.cache to a folder that has it."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _written(files: list[Path], target: Path, max_broken: int) -> dict[str, Any]:
    digest = hashlib.sha256()
    wrong: list[WrongLine] = []
    counts: list[tuple[str, int]] = []
    with open(target, "wb") as output:
        for file in files:
            count = 0
            for rows, faults in read_blocks(file):
                wrong += faults
                if len(wrong) > max_broken:
                    raise _too_many(wrong, max_broken)
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
        "distinct": _distinct(np.memmap(target, dtype=ROW, mode="r") if samples else np.empty(0, dtype=ROW)),
        "digest": digest.hexdigest(),
        "wrong": [asdict(each) for each in wrong],
        "files": counts,
    }


def _distinct(rows: Rows) -> list[int]:
    """How many values each categorical feature has."""
    known = [np.empty(0, dtype=np.uint32)] * CATEGORIES
    for begin in range(0, len(rows), _AT_ONCE):
        part = rows[begin : begin + _AT_ONCE]
        present, values = ~missing_of(part), part["categories"]
        known = [np.union1d(each, values[present[:, at], at]) for at, each in enumerate(known)]
    return [len(each) for each in known]


def _too_many(wrong: tuple[WrongLine, ...] | list[WrongLine], max_broken: int) -> DataError:
    first, *others = wrong
    more = f", and {len(others)} more" if others else ""
    return DataError(
        f"{first}{more}; data.max_broken={max_broken} lets {max_broken or 'no'} line(s) be left out: correct the file, "
        "or raise it."
    )


def _cache_folder(path: Path, cache: str) -> Path:
    """Where copies are kept; exists afterwards.

    Raises:
        DataError: If it cannot be written.
    """
    beside = (path if path.is_dir() else path.parent) / ".paceline"
    own = cache_folder()
    for folder in (beside, own) if cache == "auto" else (Path(cache).expanduser(),):
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    raise DataError(
        f"a binary copy of '{path}' is needed, and neither '{beside}' nor '{own}' can be written; set "
        "data.recommendation.cache to a folder that can."
        if cache == "auto"
        else f"data.recommendation.cache={cache} cannot be written; give a folder that can."
    )


@contextlib.contextmanager
def _alone(folder: Path, name: str) -> Iterator[None]:
    """Wait until no other process makes the same copy."""
    with open(folder / name, "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
