"""The samples of one shard by row, in any order, without reading the others: tars, JSON lines, parquet and MDS.

An open shard is a memory map, whose pages are the system's cache; of parquet, a decoded table.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.data.image.mapped import MappedFile
from paceline.data.image.tar_index import index_tar
from paceline.data.tables import explain_errors, mapped, require_pyarrow
from paceline.errors import data_error
from paceline.parsing.files import PACKED, is_ignored_member, refuse_special_inputs
from paceline.parsing.plain_text import load_json

_BLOCK = 2**24
_BLANK = (b"", b"\r")


class ShardFiles(Protocol):
    """Where shards are: a folder, or an address with copies of some of its files here."""

    @property
    def names(self) -> list[str]:
        """The names of all files, with subfolders."""
        ...

    def stamp(self, name: str) -> tuple[Any, ...]:
        """Return what changes with a file."""
        ...

    def local(self, name: str) -> Path:
        """Return a file's path on this host; fetches it if missing."""
        ...


class Rows(Protocol):
    """The samples of an open shard."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Any:
        """Return a sample; raises DataError if it is damaged."""
        ...


class JsonLines:
    """One JSON value per line; blank lines are no samples."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as stream:
            self._content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        if self._content[:8].startswith(PACKED):
            raise data_error(path, "is compressed, or an archive: unpack it.")
        marks = [np.array([-1]), *self._newlines(), np.array([len(self._content)])]
        ends = np.concatenate(marks)
        begin, end = ends[:-1] + 1, ends[1:]
        short = np.flatnonzero(end - begin <= 1)
        blank = [row for row in short.tolist() if self._content[begin[row] : end[row]] in _BLANK]
        self._begin, self._end = np.delete(begin, blank), np.delete(end, blank)

    def _newlines(self) -> Iterator[NDArray[np.int64]]:
        for first in range(0, len(self._content), _BLOCK):
            block = np.frombuffer(self._content, np.uint8, min(_BLOCK, len(self._content) - first), first)
            yield np.flatnonzero(block == ord("\n")) + first

    def __len__(self) -> int:
        return len(self._begin)

    def __getitem__(self, row: int) -> Any:
        line = self._content[int(self._begin[row]) : int(self._end[row])]
        try:
            return load_json(line)
        except ValueError as error:
            number = self._content[: int(self._begin[row])].count(b"\n") + 1
            raise data_error(self._path, f"cannot be read in line {number} ({error}): write the file again.") from error


class TarMembers:
    """Consecutive members of a tar with the same name up to its first dot: a dict of bytes by ending, and "__key__"."""

    def __init__(self, path: Path, stamp: tuple[Any, ...]) -> None:
        # The times of a copy change with each use: its index is that of the original.
        index = index_tar(MappedFile(str(path), path.stat().st_size, stamp))
        names = [index.names.text(each).removeprefix("./") for each in range(len(index.names))]
        self._kept = [each for each, name in enumerate(names) if not is_ignored_member(name)]
        keys = [_key(names[each]) for each in self._kept]
        starts = [0, *(at for at in range(1, len(keys)) if keys[at] != keys[at - 1])] if keys else []
        self._starts = np.array([*starts, len(keys)])
        self._index = index
        with path.open("rb") as stream:
            self._content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, row: int) -> dict[str, Any]:
        sample: dict[str, Any] = {}
        for place in range(self._starts[row], self._starts[row + 1]):
            member = self._kept[place]
            name, begin = self._index.names.text(member).removeprefix("./"), int(self._index.begin[member])
            sample["__key__"] = _key(name)
            ending = name.removeprefix(_key(name)).removeprefix(".").lower()
            sample[ending] = self._content[begin : begin + int(self._index.length[member])]
        return sample


def _key(name: str) -> str:
    """Return a member's name up to the first dot of its last part."""
    folder, slash, last = name.rpartition("/")
    return f"{folder}{slash}{last.partition('.')[0]}"


class ParquetRows:
    """Rows of a parquet file, as dicts by column."""

    def __init__(self, path: Path) -> None:
        self._path, pa = path, require_pyarrow()
        with explain_errors(path):
            self._file = pa.parquet.ParquetFile(mapped(path))
        self._table: Any = None

    def __len__(self) -> int:
        return int(self._file.metadata.num_rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        if self._table is None:  # an index needs the count alone, which is at the file's end
            with explain_errors(self._path):
                self._table = self._file.read()
        return {
            name: column[row].as_py()
            for name, column in zip(self._table.column_names, self._table.columns, strict=True)
        }


class MdsSamples:
    """Samples of MosaicML's format, as dicts by column; the folder's ``index.json`` names the columns.

    A file is the number of samples and their N + 1 offsets (uint32), then each sample: the sizes of its columns without
    a fixed one (uint32), and their bytes.
    """

    def __init__(self, path: Path, columns: list[tuple[str, Callable[[bytes], Any], int | None]]) -> None:
        self._path, self._columns = path, columns
        with path.open("rb") as stream:
            self._content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        (count,) = np.frombuffer(self._content, "<u4", 1).tolist()
        if 4 * (count + 2) > len(self._content):
            raise data_error(path, f"is damaged (it claims {count:,} samples): copy or create it again.")
        self._offsets = np.frombuffer(self._content, "<u4", count + 1, 4)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, row: int) -> dict[str, Any]:
        content = self._content[int(self._offsets[row]) : int(self._offsets[row + 1])]
        free = sum(size is None for _, _, size in self._columns)
        try:
            sizes = iter(np.frombuffer(content, "<u4", free).tolist())
            at, sample = 4 * free, dict[str, Any]()
            for name, read, fixed in self._columns:
                size = next(sizes) if fixed is None else fixed
                if at + size > len(content):
                    raise ValueError(f"column {name!r} extends beyond the sample")
                sample[name] = read(content[at : at + size])
                at += size
        except ValueError as error:
            raise data_error(self._path, f"is damaged in sample {row} ({error}): copy or create it again.") from error
        return sample


_MDS_NUMBERS = (
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    "float16",
    "float32",
    "float64",
)
_MDS_KINDS: Mapping[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "jpeg": bytes,
    "jpeg_array": bytes,
    "png": bytes,
    "str": bytes.decode,
    "json": load_json,
    "int": lambda value: int.from_bytes(value, "little", signed=True),
    **{name: partial(lambda kind, value: np.frombuffer(value, kind)[0].item(), f"<{name}") for name in _MDS_NUMBERS},
}


@lru_cache(maxsize=8)  # it may name thousands of shards, and each is opened with it
def _mds_index(path: Path, _stamp: tuple[Any, ...]) -> dict[str, Any]:
    return {each["raw_data"]["basename"]: each for each in load_json(path.read_bytes())["shards"]}


def _mds(place: ShardFiles, name: str, path: Path) -> MdsSamples:
    """Open a shard by the index of its folder, which has each column's name, kind, and size if all have the same."""
    folder, slash, last = name.rpartition("/")
    listed = f"{folder}{slash}index.json"
    try:
        shard = _mds_index(place.local(listed), place.stamp(listed))[last]
        named = list(zip(shard["column_names"], shard["column_encodings"], shard["column_sizes"], strict=True))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise data_error(
            name, f"is not described by the index.json of its folder ({error!r}): copy all again."
        ) from error
    for column, kind, _ in named:
        if kind not in _MDS_KINDS:
            known = ", ".join(_MDS_KINDS)
            raise data_error(path, f"has column {column!r} of kind {kind!r}; write it as one of {known}.")
    return MdsSamples(path, [(column, _MDS_KINDS[kind], size) for column, kind, size in named])


FORMATS: Mapping[str, Callable[[ShardFiles, str, Path], Rows]] = {
    "jsonl": lambda _place, _name, path: JsonLines(path),
    "mds": _mds,
    "ndjson": lambda _place, _name, path: JsonLines(path),
    "parquet": lambda _place, _name, path: ParquetRows(path),
    "tar": lambda place, name, path: TarMembers(path, place.stamp(name)),
}
"""How a shard is opened, by the ending of its name."""


def open_shard(place: ShardFiles, name: str) -> Rows:
    """Open a shard.

    Raises:
        DataError: If it is missing or damaged.
        StorageError: If it cannot be fetched.
    """
    path = place.local(name)
    refuse_special_inputs(path)
    try:
        return FORMATS[path.suffix[1:].lower()](place, name, path)
    except (OSError, ValueError) as error:  # an empty file has nothing to map
        reason = getattr(error, "strerror", None) or error
        raise data_error(path, f"cannot be read ({reason}): copy it again.") from error
