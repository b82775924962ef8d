"""Image tables in parquet files or Arrow streams: images in the rows, as on the hub, or paths of files.

A parquet page holds many images compressed together, so images cannot be read individually. They are read by row group,
and the last few groups are cached. The file's footer gives a group's size; nothing else is read before an image is
requested. Images in Arrow streams are memory-mapped; such a file counts as one group.
"""

from __future__ import annotations

import glob
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.data.image.dataset import DatasetRequest, Probe, StoredImages, in_splits, probe
from paceline.data.image.decode import BrokenImageError
from paceline.data.image.mapped import EncodedImages, MappedFile, mapped_files
from paceline.data.image.sets import IMAGENET, TABLE
from paceline.data.image.source import Ids, NameArray, SubsetSource
from paceline.data.image.tables import ImageTable
from paceline.data.splits import TRAIN, UNREAD_SPLITS, VALIDATION
from paceline.data.tables import TableFile, explain_errors, files_ending_in, mapped, read_stream, require_pyarrow
from paceline.errors import DataError, data_error
from paceline.parsing.files import SkippedItems, refuse_special_inputs
from paceline.parsing.plain_text import utf8
from paceline.parsing.units import format_bytes
from paceline.plugins.dataset_registry import Place, dataset

# Cached in each reading process; hub datasets have groups of 100 images.
LARGEST_KEPT = 256 * 2**20
_GROUPS_PROBED, _PROBED_IN_EACH = 8, 16


class RowGroup(NamedTuple):
    """One row group.

    Attributes:
        file: Index of its file.
        number: Its index in the file.
        rows: Number of images.
        size: Uncompressed size in bytes.
        nulls: Number of missing images, if the file gives it.
    """

    file: int
    number: int
    rows: int
    size: int
    nulls: int


def _metadata(path: Path) -> Any:
    refuse_special_inputs(path)
    with explain_errors(path):
        return require_pyarrow().parquet.read_metadata(mapped(path))


def _bytes_in(images: Any) -> Any:
    """Return the images' content from a column of bytes or of structs with bytes; null where a struct is null."""
    arrow = require_pyarrow()
    return arrow.compute.struct_field(images, "bytes") if arrow.types.is_struct(images.type) else images


class TableSource(EncodedImages):
    """The images of some parquet files, with a cache of the last row groups."""

    is_mapped = False

    def __init__(self, paths: Sequence[Path], column: str, labels: Ids, names: Sequence[str]) -> None:
        """Read the files' footers.

        Args:
            paths: The files.
            column: Column of the images' bytes: a column, or ``column.bytes``.
            labels: Label of each row.
            names: Name of each row.

        Raises:
            DataError: If a file cannot be read, or lacks the column.
        """
        self.channels = 3
        self.labels = labels
        self.names = NameArray.of(names)
        self.leaf = column
        self.paths = mapped_files(paths)
        self.groups = [group for group in self._find_groups() if group.rows]
        self.starts = np.cumsum([0, *(group.rows for group in self.groups)])
        self._kept: dict[int, Any] = {}

    def _find_groups(self) -> list[RowGroup]:
        self._metadata = [_metadata(Path(file.path)) for file in self.paths]
        groups = []
        for file, metadata in enumerate(self._metadata):
            for number in range(metadata.num_row_groups):
                found = metadata.row_group(number)
                columns = map(found.column, range(found.num_columns))
                images = next((one for one in columns if one.path_in_schema == self.leaf), None)
                if images is None:
                    raise DataError(
                        f"{self.paths[file].path!r} lacks the column {self.leaf!r}, which other files of the table "
                        "have."
                    )
                said = images.statistics
                nulls = said.null_count if said is not None and said.has_null_count else 0
                groups.append(RowGroup(file, number, found.num_rows, images.total_uncompressed_size, nulls))
        return groups

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

    def path(self, sample: int) -> str:
        """Return the sample's name and its file."""
        return f"{self.names.text(sample)} in {self.paths[self.groups[self._group_of(sample)].file].path}"

    def files(self, samples: Ids) -> list[str]:
        """Return the paths of all files."""
        return [file.path for file in self.paths]

    def described(self) -> str:
        """Describe the cost of reading."""
        largest = max(self.groups, key=lambda group: group.size)
        return (
            f"{len(self.groups):,} row groups of up to {max(group.rows for group in self.groups):,} images; an image "
            f"is read with its group ({format_bytes(largest.size)}), of which each process keeps "
            f"{format_bytes(LARGEST_KEPT)}"
        )

    def probe(self, path: str, *, in_any_order: bool) -> Probe:
        """Probe the headers of some images from at most 8 row groups.

        Args:
            path: The table, for the message.
            in_any_order: Whether to reject row groups that are too large to read for a single image.

        Raises:
            DataError: If one is too large according to its file.
        """
        largest = max(self.groups, key=lambda group: group.size)
        if in_any_order and largest.size > LARGEST_KEPT:
            raise data_error(
                path,
                f"has {largest.rows:,} images, {format_bytes(largest.size)}, in one row group, and none of them can "
                f"be read without the others: run `paceline pack {path} DEST`, and train with data.dataset=packed "
                "data.path=DEST; or write the table again with smaller groups (row_group_size=100).",
            )
        groups = len(self.groups)
        spread = [
            np.linspace(self.starts[group], self.starts[group + 1] - 1, _PROBED_IN_EACH).astype(np.int64)
            for group in range(0, groups, max(1, -(-groups // _GROUPS_PROBED)))
        ]
        return probe(self, np.unique(np.concatenate(spread)).tolist())

    def digest(self) -> str:
        """Digest of labels and names, and of the files' names and sizes."""
        digest = hashlib.sha256()
        for file in self.paths:
            digest.update(f"{utf8(Path(file.path).name)}\0{file.size}\n".encode())
        for part in (self.labels, self.names.ends, self.names.blob):
            digest.update(part.tobytes())
        return digest.hexdigest()

    def rows_of(self, number: int) -> Any:
        """Read a row group: Arrow's array of images; raises OSError and Arrow's errors."""
        group = self.groups[number]
        file = self.paths[group.file]
        if MappedFile.at(file.path) != file:
            # Reading mapped memory beyond the end of a truncated file kills the process.
            raise OSError("it has changed since the run started")
        return self._read_group(group, file.path)

    def _read_group(self, group: RowGroup, path: str) -> Any:
        with require_pyarrow().parquet.ParquetFile(mapped(path), metadata=self._metadata[group.file]) as opened:
            rows = opened.read_row_group(group.number, columns=[self.leaf], use_threads=False)
        return _bytes_in(rows.column(0).combine_chunks())

    def _group_of(self, sample: int) -> int:
        return int(np.searchsorted(self.starts, sample, side="right")) - 1

    def _load(self, number: int, sample: int) -> Any:
        """Read a row group and evict the oldest ones from the cache."""
        try:
            images = self.rows_of(number)
        except (OSError, require_pyarrow().ArrowException) as error:
            path = self.paths[self.groups[number].file].path
            reason = f"{path}, in which it lies: {' '.join(str(error).split())}"
            raise BrokenImageError(self.path(sample), reason) from error
        # The size in the file's metadata counts repeated images only once.
        room = (math.inf if self.is_mapped else LARGEST_KEPT) - images.nbytes
        # Thread-safe enough: at worst a group is read twice.
        for each, kept in list(self._kept.items())[::-1]:
            room -= kept.nbytes
            if room < 0:
                self._kept.pop(each, None)
        self._kept[number] = images
        return images


class StreamSource(TableSource):
    """The images of memory-mapped Arrow streams; a file is one row group."""

    is_mapped = True

    def _find_groups(self) -> list[RowGroup]:
        groups = []
        for number, file in enumerate(self.paths):
            with explain_errors(Path(file.path)):
                images = self._read_group(None, file.path)
            groups.append(RowGroup(number, 0, len(images), 0, images.null_count))
        return groups

    def _read_group(self, group: RowGroup | None, path: str) -> Any:
        return _bytes_in(read_stream(path).column(self.leaf.removesuffix(".bytes")))


class StoredTable(ImageTable):
    """A table whose rows hold the images."""

    @property
    def column(self) -> str:
        """Path of the images' bytes within the image column."""
        return f"{self.image_column}.bytes" if self.kind == "struct" else self.image_column

    def row_labels(self) -> tuple[tuple[str, ...], NDArray[Any]]:
        """Return class names and each row's label, -1 for unused rows; or column names and their numbers.

        Raises:
            DataError: If a row lacks a label or a numeric target.
        """
        parts, request = self.hold_out_labelled(), self.request
        if request.data.target_columns:
            numbers = self.read_numbers(np.sort(np.concatenate(parts)), request.problems.add)
            request.refuse_problems()
            return request.data.target_columns, numbers
        classes, numbered = self.labels(parts)
        labels = np.full((len(self.rows), *numbered[0].shape[1:]), -1, dtype=numbered[0].dtype)
        for part, each in zip(parts, numbered, strict=True):
            labels[part] = each
        return classes, labels

    def names(self, splits: Sequence[str] = (TRAIN, VALIDATION)) -> list[str]:
        """Return each row's name: its path, or else its index in its split."""
        names = [""] * len(self.rows)
        for split, ids in zip(splits, self.parts.splits, strict=False):
            for place, row in enumerate(ids.tolist()):
                names[row] = f"{split}[{place}]"
        column = self.image_column
        if self.kind != "struct" or self.first.schema.field(column).type.get_field_index("path") < 0:
            return names
        tables = [file.read([column], ".path") for file in self.files]
        field = require_pyarrow().compute.struct_field
        paths = [path for table in tables for path in field(table.column(column), "path").to_pylist()]
        return [path or name for path, name in zip(paths, names, strict=True)]

    def check_present(self, source: TableSource) -> None:
        """Reject rows without an image, as far as the files' footers show them."""
        number = next((number for number, group in enumerate(source.groups) if group.nulls), None)
        if number is None:
            return
        group = source.groups[number]
        row = int(source.starts[number]) + source.rows_of(number).is_null().to_pylist().index(True)
        advice = "has no image: leave such rows out"
        if group.nulls == group.rows and self.kind == "struct":
            name = source.names.text(row)
            advice = f"names a file, {name!r}, instead of holding an image: embed the images, or name a column of paths"
        raise DataError(f"{self.row_name(row)} {advice}, and write the table again.")

    def opened(
        self, source: TableSource, classes: tuple[str, ...], probe: Probe, digest: str, **facts: Any
    ) -> StoredImages:
        """Open the images of the table; ``facts`` are other attributes of :class:`StoredImages`."""
        source.channels = self.request.channels or (1 if probe.greyscale else 3)
        is_whole = self.parts.held_out is None and len(self.parts.train) == len(source)
        return in_splits(
            [source] if is_whole else [SubsetSource(source, each) for each in self.parts.splits],
            self.parts.description,
            self.request.data.validation_fraction,
            classes=classes,
            digest=digest,
            channels=source.channels,
            probe=probe,
            **facts,
        )


def names_images(features: Mapping[str, Any]) -> bool:
    """Whether Hugging Face's metadata name columns of images and of labels."""
    return {"Image", "ClassLabel"} <= {each.get("_type") for each in features.values() if isinstance(each, dict)}


def _is_plain(place: Place) -> bool:
    """Whether it is a parquet file, or a folder of such without these metadata."""
    if not place.is_folder:
        return True
    files = files_ending_in("parquet", place.path, SkippedItems()) if ".parquet" in place.endings else []
    return bool(files) and not names_images(TableFile(files[0], "parquet").features)


@dataset(
    "parquet",
    endings=(".parquet",),
    sniff=_is_plain,
    keys=(*TABLE, "target_columns", "split_column"),
    size=IMAGENET,
)
def open_parquet(request: DatasetRequest) -> StoredImages:
    """Read the labels of parquet tables of images or paths, and probe the headers of a few images.

    ``data.path`` is a file, a folder of files, or a pattern. If the table holds paths, ``request.problems`` collects
    invalid ones.

    Raises:
        DataError: If there is no such table, or a column or a label is missing.
    """
    root, left_out = request.path, SkippedItems()
    if root.is_dir():
        paths = files_ending_in("parquet", root, left_out)
    elif root.exists():
        paths = [root]
    else:
        paths = sorted(Path(each) for each in glob.glob(str(root), recursive=True) if not Path(each).is_dir())
    if not paths:
        what = "are no .parquet files in it" if root.is_dir() else "is no such file or folder"
        raise DataError(f"data.path is {str(root)!r}, and there {what}: correct the path.")
    table = StoredTable(root, [TableFile(path, "parquet") for path in paths], request)
    for path in table.unread:
        left_out.add(UNREAD_SPLITS, path.name)
    if table.kind == "path":
        images = table.open_paths()
        return replace(images, left_out=(*left_out.summaries(), *images.left_out))
    classes, labels = table.row_labels()
    source = TableSource([file.path for file in table.files], table.column, labels, table.names())
    table.check_present(source)
    probe = source.probe(str(request.data.path), in_any_order=request.in_any_order)
    digest = hashlib.sha256(source.digest().encode() + "\0".join(classes).encode())
    for ids in (table.parts.train, table.parts.held_out):
        digest.update(b"-" if ids is None else ids.astype("<i8").tobytes())
    return table.opened(
        source, classes, probe, digest.hexdigest(), listing=source.described(), left_out=left_out.summaries()
    )
