"""How are images read that lie in parquet files? Row group by row group, of which the last few are kept.

A page of parquet holds many images, compressed together, so that none can be read by itself. What a group costs is
known from the file's end; nothing else is read before an image is asked for.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.image.arrow import mapped, require_pyarrow
from paceline.data.image.decode import BrokenImageError, decode, upright_size
from paceline.data.image.folder import Probe
from paceline.data.image.mapped import MappedFile, Names, mapped_files, probe
from paceline.data.image.source import Ids, Image
from paceline.errors import DataError
from paceline.escaping import utf8
from paceline.files import refuse_odd_kinds
from paceline.plain_json import load_json
from paceline.units import format_bytes

# Kept in each process that reads; hub datasets have groups of 100 images.
LARGEST_KEPT = 256 * 2**20
_GROUPS_PROBED, _PROBED_IN_EACH = 8, 16


@dataclass(frozen=True)
class RowGroup:
    """One row group.

    Attributes:
        file: Number of its file.
        number: Its number there.
        rows: How many images it has.
        size: Their length in bytes, out of compression.
        nulls: How many of them are missing, if the file says so.
    """

    file: int
    number: int
    rows: int
    size: int
    nulls: int


@dataclass(frozen=True)
class Table:
    """Parquet files, of which the ends were read.

    Attributes:
        files: The files.
        metadata: What each one's end says.
        column: Name of the column of images.
        leaf: Where in it the images' bytes are: the column, or ``column.bytes``.
        groups: All row groups, in order.
    """

    files: tuple[MappedFile, ...]
    metadata: tuple[Any, ...]
    column: str
    leaf: str
    groups: tuple[RowGroup, ...]

    @property
    def rows(self) -> int:
        """How many images there are."""
        return sum(group.rows for group in self.groups)

    @property
    def told(self) -> str:
        """What reading it costs, for people."""
        largest = max(self.groups, key=lambda group: group.size)
        return (
            f"{len(self.groups):,} row groups of up to {max(group.rows for group in self.groups):,} images; an image "
            f"is read with its group ({format_bytes(largest.size)}), of which each process keeps "
            f"{format_bytes(LARGEST_KEPT)}"
        )


def open_table(paths: Sequence[Path], column: str, leaf: str) -> Table:
    """Read the ends of parquet files.

    Raises:
        DataError: If one cannot be read, or lacks the column.
    """
    files = mapped_files(paths)
    metadata = [read_metadata(path) for path in paths]
    groups = []
    for number, (file, each) in enumerate(zip(files, metadata, strict=True)):
        for group in range(each.num_row_groups):
            found = each.row_group(group)
            columns = [found.column(index) for index in range(found.num_columns)]
            images = next((one for one in columns if one.path_in_schema == leaf), None)
            if images is None:
                raise DataError(f"{file.path!r} lacks the column {leaf!r}, which other files of the table have.")
            said = images.statistics
            nulls = said.null_count if said is not None and said.has_null_count else 0
            groups.append(RowGroup(number, group, found.num_rows, images.total_uncompressed_size, nulls))
    return Table(tuple(files), tuple(metadata), column, leaf, tuple(group for group in groups if group.rows))


def read_metadata(path: Path) -> Any:
    """What the end of a parquet file says.

    Raises:
        DataError: If it is damaged, or none.
    """
    arrow = require_pyarrow()
    refuse_odd_kinds(path)
    try:
        return arrow.parquet.read_metadata(mapped(path))
    except (OSError, arrow.ArrowException) as error:
        raise unreadable(path, error) from error


def read_schema(path: Path) -> tuple[Any, Mapping[str, Any]]:
    """The columns of a parquet file, and what Hugging Face's library has written down of each, if it has.

    Raises:
        DataError: If it is damaged, or none.
    """
    arrow = require_pyarrow()
    refuse_odd_kinds(path)
    try:
        schema = arrow.parquet.read_schema(mapped(path))
    except (OSError, arrow.ArrowException) as error:
        raise unreadable(path, error) from error
    try:
        features = load_json((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    except (ValueError, AttributeError):
        features = {}
    return schema, features if isinstance(features, dict) else {}


def unreadable(path: Path, error: Exception) -> DataError:
    """What is said of a file that pyarrow cannot read."""
    return DataError(f"{str(path)!r} cannot be read ({' '.join(str(error).split())}): download or make it again.")


def check_in_any_order(table: Table, path: str) -> None:
    """Refuse row groups that are too large to be read for one image.

    Raises:
        DataError: Naming the size.
    """
    largest = max(table.groups, key=lambda group: group.size)
    _check_size(largest, largest.size, path)


def _check_size(group: RowGroup, size: int, path: str) -> None:
    if size > LARGEST_KEPT:
        raise DataError(
            f"{path!r} has {group.rows:,} images, {format_bytes(size)}, in one row group, and none of them "
            f"can be read without the others: run `paceline pack {path} DEST`, and train with data.dataset=packed "
            "data.path=DEST; or write the table again with smaller groups (row_group_size=100)."
        )


class ParquetSource:
    """The images of some parquet files; keeps the row groups that were read last."""

    def __init__(self, table: Table, labels: Ids, names: Names) -> None:
        """Take one label and one name for each row."""
        self.channels = 3
        self.labels = labels
        self.names = names
        self.table = table
        self._starts = np.cumsum([0, *(group.rows for group in table.groups)])
        self._kept: dict[int, Any] = {}
        # Number and length in memory of the group that came to most; images that repeat are stored once in a file.
        self._largest = (0, 0)

    def __len__(self) -> int:
        return len(self.labels)

    def encoded(self, sample: int) -> memoryview:
        """Return the content of image file ``sample``; raises BrokenImageError."""
        group = int(np.searchsorted(self._starts, sample, side="right")) - 1
        images = self._kept.get(group)
        if images is None:
            images = self._load(group, sample)
        content = images[sample - int(self._starts[group])].as_buffer()
        if content is None:
            raise BrokenImageError(self.path(sample), "its row has no image")
        return memoryview(content)

    def read(self, sample: int) -> Image:
        """Decode image ``sample``; raises BrokenImageError."""
        try:
            return decode(bytes(self.encoded(sample)), self.channels)
        except BrokenImageError as error:
            raise BrokenImageError(self.path(sample), error.reason) from error

    def size(self, sample: int) -> tuple[int, int] | None:
        """Return (height, width) of image ``sample`` from its head; None if that cannot be read."""
        return upright_size(io.BytesIO(self.encoded(sample)))

    def path(self, sample: int) -> str:
        """Return the sample's name, and the file that it lies in."""
        group = int(np.searchsorted(self._starts, sample, side="right")) - 1
        return f"{self.names[sample]} in {self.table.files[self.table.groups[group].file].path}"

    def files(self, samples: Ids) -> list[str]:
        """Return the paths of all files."""
        return [file.path for file in self.table.files]

    def probe(self) -> Probe:
        """Look at the heads of some images, of at most 8 row groups."""
        groups = len(self.table.groups)
        chosen = range(0, groups, max(1, -(-groups // _GROUPS_PROBED)))
        spread = [
            np.linspace(self._starts[group], self._starts[group + 1] - 1, _PROBED_IN_EACH).astype(np.int64)
            for group in chosen
        ]
        return probe(self, np.unique(np.concatenate(spread)).tolist())

    def check_in_any_order(self, path: str) -> None:
        """Refuse row groups that turned out to be too large when they were read.

        Raises:
            DataError: Naming the size.
        """
        number, size = self._largest
        _check_size(self.table.groups[number], size, path)

    def digest(self) -> str:
        """Over labels and names, and the files' names and sizes."""
        digest = hashlib.sha256()
        for file in self.table.files:
            digest.update(f"{utf8(Path(file.path).name)}\0{file.size}\n".encode())
        for part in (self.labels, self.names.ends, self.names.blob):
            digest.update(part.tobytes())
        return digest.hexdigest()

    def _load(self, number: int, sample: int) -> Any:
        """Read a row group, and let go of those that were read first."""
        table, group = self.table, self.table.groups[number]
        file, arrow = table.files[group.file], require_pyarrow()
        try:
            if MappedFile.at(file.path) != file:
                # Beyond the end of a file that shrank, mapped memory kills whoever reads it.
                raise OSError("it has changed since the run began")
            metadata = table.metadata[group.file]
            with arrow.parquet.ParquetFile(mapped(file.path), metadata=metadata) as opened:
                rows = opened.read_row_group(group.number, columns=[table.leaf], use_threads=False)
        except (OSError, arrow.ArrowException) as error:
            reason = f"{file.path}, in which it lies: {' '.join(str(error).split())}"
            raise BrokenImageError(self.path(sample), reason) from error
        images = rows.column(table.column).combine_chunks()
        images = images.field("bytes") if table.leaf != table.column else images
        # What a file says of a group is its length there, where images that repeat may be stored once.
        room = LARGEST_KEPT - images.nbytes
        self._largest = max(self._largest, (number, images.nbytes), key=itemgetter(1))
        # Several threads may ask at once: the worst that comes of it is a group read twice.
        for each, kept in list(self._kept.items())[::-1]:
            room -= kept.nbytes
            if room < 0:
                self._kept.pop(each, None)
        self._kept[number] = images
        return images
