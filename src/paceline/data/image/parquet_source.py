"""Images in parquet files, read row group by row group, of which the last few are kept.

A page of parquet holds many images, compressed together, so that none can be read by itself. What a group costs is
known from the file's end; nothing else is read before an image is asked for.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paceline.data.image.arrow import mapped, require_pyarrow
from paceline.data.image.dataset import Probe
from paceline.data.image.decode import BrokenImageError, decode, upright_size
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


class RowGroup(NamedTuple):
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


def read_metadata(path: Path) -> Any:
    """The end of a parquet file.

    Raises:
        DataError: If it is damaged, or none.
    """
    return _read_end(path, "read_metadata")


def read_schema(path: Path) -> tuple[Any, Mapping[str, Any]]:
    """The columns of a parquet file, and what Hugging Face's library has written down of each, if it has.

    Raises:
        DataError: If it is damaged, or none.
    """
    schema = _read_end(path, "read_schema")
    try:
        features = load_json((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    except (ValueError, AttributeError):
        features = {}
    return schema, features if isinstance(features, dict) else {}


def _read_end(path: Path, read: str) -> Any:
    arrow = require_pyarrow()
    refuse_odd_kinds(path)
    try:
        return getattr(arrow.parquet, read)(mapped(path))
    except (OSError, arrow.ArrowException) as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> DataError:
    """The error of a file that pyarrow cannot read."""
    return DataError(f"{str(path)!r} cannot be read ({' '.join(str(error).split())}): download or make it again.")


class ParquetSource:
    """The images of some parquet files; keeps the row groups that were read last."""

    def __init__(self, paths: Sequence[Path], leaf: str, labels: Ids, names: Sequence[str]) -> None:
        """Read the ends of the files.

        Args:
            paths: The files.
            leaf: Where the images' bytes are: a column, or ``column.bytes``.
            labels: One for each row.
            names: Likewise.

        Raises:
            DataError: If a file cannot be read, or lacks the column.
        """
        self.channels = 3
        self.labels = labels
        self.names = Names.of(names)
        self.leaf = leaf
        self.paths = mapped_files(paths)
        self._metadata = [read_metadata(path) for path in paths]
        groups = [
            _row_group(metadata, number, group, file.path, leaf)
            for number, (file, metadata) in enumerate(zip(self.paths, self._metadata, strict=True))
            for group in range(metadata.num_row_groups)
        ]
        self.groups = [group for group in groups if group.rows]
        self.starts = np.cumsum([0, *(group.rows for group in self.groups)])
        self._kept: dict[int, Any] = {}
        # Number and length in memory of the group that came to most; images that repeat are stored once in a file.
        self._largest = (0, 0)

    def __len__(self) -> int:
        return len(self.labels)

    def encoded(self, sample: int) -> memoryview:
        """Return the content of image file ``sample``; raises BrokenImageError."""
        group = self._group_of(sample)
        images = self._kept.get(group)
        if images is None:
            images = self._load(group, sample)
        content = images[sample - int(self.starts[group])].as_buffer()
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
        return f"{self.names[sample]} in {self.paths[self.groups[self._group_of(sample)].file].path}"

    def files(self, samples: Ids) -> list[str]:
        """Return the paths of all files."""
        return [file.path for file in self.paths]

    def described(self) -> str:
        """What reading costs, for people."""
        largest = max(self.groups, key=lambda group: group.size)
        return (
            f"{len(self.groups):,} row groups of up to {max(group.rows for group in self.groups):,} images; an image "
            f"is read with its group ({format_bytes(largest.size)}), of which each process keeps "
            f"{format_bytes(LARGEST_KEPT)}"
        )

    def probe(self, path: str, *, in_any_order: bool) -> Probe:
        """Look at the heads of some images, of at most 8 row groups.

        Args:
            path: The table, for the message.
            in_any_order: Whether row groups are refused that are too large to be read for one image.

        Raises:
            DataError: If one is too large, by what its file says or by what it came to.
        """
        if in_any_order:
            largest = max(self.groups, key=lambda group: group.size)
            _check_size(largest, largest.size, path)
        groups = len(self.groups)
        spread = [
            np.linspace(self.starts[group], self.starts[group + 1] - 1, _PROBED_IN_EACH).astype(np.int64)
            for group in range(0, groups, max(1, -(-groups // _GROUPS_PROBED)))
        ]
        found = probe(self, np.unique(np.concatenate(spread)).tolist())
        if in_any_order:
            number, size = self._largest
            _check_size(self.groups[number], size, path)
        return found

    def digest(self) -> str:
        """Over labels and names, and the files' names and sizes."""
        digest = hashlib.sha256()
        for file in self.paths:
            digest.update(f"{utf8(Path(file.path).name)}\0{file.size}\n".encode())
        for part in (self.labels, self.names.ends, self.names.blob):
            digest.update(part.tobytes())
        return digest.hexdigest()

    def rows_of(self, number: int) -> Any:
        """Read a row group: Arrow's array of images; raises OSError and what Arrow raises."""
        group = self.groups[number]
        file, arrow = self.paths[group.file], require_pyarrow()
        if MappedFile.at(file.path) != file:
            # Beyond the end of a file that shrank, mapped memory kills whoever reads it.
            raise OSError("it has changed since the run began")
        with arrow.parquet.ParquetFile(mapped(file.path), metadata=self._metadata[group.file]) as opened:
            rows = opened.read_row_group(group.number, columns=[self.leaf], use_threads=False)
        images = rows.column(0).combine_chunks()
        return images.field("bytes") if require_pyarrow().types.is_struct(images.type) else images

    def _group_of(self, sample: int) -> int:
        return int(np.searchsorted(self.starts, sample, side="right")) - 1

    def _load(self, number: int, sample: int) -> Any:
        """Read a row group, and let go of those that were read first."""
        try:
            images = self.rows_of(number)
        except (OSError, require_pyarrow().ArrowException) as error:
            path = self.paths[self.groups[number].file].path
            reason = f"{path}, in which it lies: {' '.join(str(error).split())}"
            raise BrokenImageError(self.path(sample), reason) from error
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


def _row_group(metadata: Any, file: int, number: int, path: str, leaf: str) -> RowGroup:
    found = metadata.row_group(number)
    columns = [found.column(index) for index in range(found.num_columns)]
    images = next((one for one in columns if one.path_in_schema == leaf), None)
    if images is None:
        raise DataError(f"{path!r} lacks the column {leaf!r}, which other files of the table have.")
    said = images.statistics
    nulls = said.null_count if said is not None and said.has_null_count else 0
    return RowGroup(file, number, found.num_rows, images.total_uncompressed_size, nulls)


def _check_size(group: RowGroup, size: int, path: str) -> None:
    if size > LARGEST_KEPT:
        raise DataError(
            f"{path!r} has {group.rows:,} images, {format_bytes(size)}, in one row group, and none of them "
            f"can be read without the others: run `paceline pack {path} DEST`, and train with data.dataset=packed "
            "data.path=DEST; or write the table again with smaller groups (row_group_size=100)."
        )
