"""Image tables in parquet files or Arrow streams: images in the rows, as on the hub, or paths of files.

A parquet page holds many images compressed together, so images cannot be read individually. They are read by row group,
and the last few groups are cached. The file's footer gives a group's size; nothing else is read before an image is
requested. Images in Arrow streams are memory-mapped; such a file counts as one group.
"""

from __future__ import annotations

import glob
import hashlib
import math
import os
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
from paceline.data.image.source import Ids, Names, SubsetSource
from paceline.data.image.tables import (
    Parts,
    explain_errors,
    files_ending_in,
    find_columns,
    hold_out_labelled,
    mapped,
    name_rows,
    number_rows,
    open_paths,
    parts_of,
    read_numbers,
    require_pyarrow,
    splits_of_files,
)
from paceline.data.splits import TEST, TRAIN, UNREAD_SPLITS, VALIDATION
from paceline.dataset_registry import Place, dataset
from paceline.errors import DataError, did_you_mean
from paceline.escaping import utf8
from paceline.files import SkippedItems, refuse_special_inputs
from paceline.plain_json import load_json
from paceline.units import format_bytes

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


def read_schema(path: Path) -> tuple[Any, Mapping[str, Any]]:
    """Return the columns of a parquet file, and their Hugging Face metadata, if any.

    Raises:
        DataError: If it is damaged or not a parquet file.
    """
    schema = _read_end(path, "read_schema")
    try:
        features = load_json((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    except (ValueError, AttributeError):
        features = {}
    return schema, features if isinstance(features, dict) else {}


def _read_end(path: Path, read: str) -> Any:
    refuse_special_inputs(path)
    with explain_errors(path):
        return getattr(require_pyarrow().parquet, read)(mapped(path))


def read_stream(path: str | Path) -> Any:
    """Return an Arrow stream as a memory-mapped table; raises DataError and Arrow's errors."""
    refuse_special_inputs(path)
    ipc = require_pyarrow().ipc
    # Without threads, which do not exist in a forked loader process.
    table = ipc.open_stream(mapped(path), options=ipc.IpcReadOptions(use_threads=False)).read_all()
    table.validate(full=True)
    return table


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
        self.names = Names.of(names)
        self.leaf = column
        self.paths = mapped_files(paths)
        self.groups = [group for group in self._find_groups() if group.rows]
        self.starts = np.cumsum([0, *(group.rows for group in self.groups)])
        self._kept: dict[int, Any] = {}

    def _find_groups(self) -> list[RowGroup]:
        self._metadata = [_read_end(Path(file.path), "read_metadata") for file in self.paths]
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
            raise DataError(
                f"{path!r} has {largest.rows:,} images, {format_bytes(largest.size)}, in one row group, and none of "
                f"them can be read without the others: run `paceline pack {path} DEST`, and train with "
                "data.dataset=packed data.path=DEST; or write the table again with smaller groups (row_group_size=100)."
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


def names_images(features: Mapping[str, Any]) -> bool:
    """Whether Hugging Face's metadata name columns of images and of labels."""
    return {"Image", "ClassLabel"} <= {each.get("_type") for each in features.values() if isinstance(each, dict)}


def _is_plain(place: Place) -> bool:
    """Whether it is a parquet file, or a folder of such without these metadata."""
    if not place.is_folder:
        return True
    files = files_ending_in("parquet", place.path, SkippedItems()) if ".parquet" in place.endings else []
    return bool(files) and not names_images(read_schema(files[0])[1])


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
    table = ImageTable(root, paths, request)
    for path in table.unread:
        left_out.add(UNREAD_SPLITS, path.name)
    if table.kind == "path":
        images = table.open_paths()
        return replace(images, left_out=(*left_out.summaries(), *images.left_out))
    classes, labels = table.labels()
    source = TableSource(table.paths, table.column, labels, table.names())
    table.check_present(source)
    probe = source.probe(str(request.data.path), in_any_order=request.in_any_order)
    digest = hashlib.sha256(source.digest().encode() + "\0".join(classes).encode())
    for ids in (table.parts.train, table.parts.held_out):
        digest.update(b"-" if ids is None else ids.astype("<i8").tobytes())
    return table.opened(
        source, classes, probe, digest.hexdigest(), listing=source.described(), left_out=left_out.summaries()
    )


class ImageTable:
    """The files of one table, with all used columns read except the images."""

    def __init__(
        self,
        root: Path,
        paths: Sequence[Path],
        request: DatasetRequest,
        features: Mapping[str, Any] | None = None,
        splits: Sequence[str] = (),
    ) -> None:
        """Read the files.

        Args:
            root: Their folder, for messages.
            paths: The files, parquet or Arrow streams.
            request: Gives the column names.
            features: For Arrow streams, Hugging Face metadata of each column.
            splits: For Arrow streams, the split of each file.

        Raises:
            DataError: If a file cannot be read, or a column is missing.
        """
        self.root, self.paths, self._request, self._is_stream = root, list(paths), request, bool(splits)
        self.name = repr(str(root))
        if features is None:
            self.schema, features = read_schema(paths[0])
            names = self.schema.names
        else:
            with explain_errors(paths[0]):
                self.schema, names = read_stream(paths[0]).schema, list(features)
        self.features = features
        self.columns = find_columns(request.data, names, self.name, features)
        with explain_errors(paths[0]):
            image_type = self.schema.field(self.columns.image).type
        self.kind = self._kind(image_type)
        named, self.unread = list(splits) or [TRAIN] * len(paths), list[Path]()
        if self.columns.split is None and not splits:
            # By file name; files of unused splits are removed.
            base = root if root.is_dir() else Path(os.path.commonpath([each.parent for each in paths]))
            named = splits_of_files(paths, base) if len(paths) > 1 else [TRAIN]
            known = {TRAIN, VALIDATION, TEST}
            self.paths = [path for path, split in zip(paths, named, strict=True) if split in known]
            self.unread = [path for path, split in zip(paths, named, strict=True) if split not in known]
            named = [split for split in named if split in known]
        image, labels, split = self.columns
        wanted = [*labels, *([] if split is None else [split]), *([image] if self.kind == "path" else [])]
        tables = [self._read(path, wanted) for path in self.paths]
        self.counts = [len(table) for table in tables]
        if sum(self.counts) == 0:
            raise DataError(f"{self.name} has no rows: write the table again.")
        self.rows = {name: [cell for table in tables for cell in table.column(name).to_pylist()] for name in wanted}
        self.parts = self._parts(named)

    @property
    def column(self) -> str:
        """Path of the images' bytes within the image column."""
        return f"{self.columns.image}.bytes" if self.kind == "struct" else self.columns.image

    def _kind(self, found: Any) -> str:
        """Return the kind of the image column: ``bytes``, a ``struct`` with bytes, or a ``path``."""
        types = require_pyarrow().types
        if types.is_binary(found) or types.is_large_binary(found):
            return "bytes"
        inner = found.field("bytes").type if types.is_struct(found) and found.get_field_index("bytes") >= 0 else None
        if inner is not None and (types.is_binary(inner) or types.is_large_binary(inner)):
            return "struct"
        if not self._is_stream and (types.is_string(found) or types.is_large_string(found)):
            return "path"
        others = [each.name for each in self.schema if types.is_struct(each.type) or types.is_binary(each.type)]
        raise DataError(
            f"{self.name}: column {self.columns.image!r} is of the type {found}, but images are bytes, a struct with "
            f"bytes and path{'' if self._is_stream else ', or paths'}: name another in data.image_column."
            f"{did_you_mean(self.columns.image, others)}"
        )

    def _read(self, path: Path, columns: list[str], field: str = "") -> Any:
        """Read columns of a file as an Arrow table; from parquet struct columns possibly a single field."""
        with explain_errors(path):
            if self._is_stream:
                return read_stream(path).select(columns)
            with require_pyarrow().parquet.ParquetFile(mapped(path)) as opened:
                if lacking := [name for name in columns if name not in opened.schema_arrow.names]:
                    raise DataError(f"{str(path)!r} lacks the column {lacking[0]!r}, which {str(self.paths[0])!r} has.")
                return opened.read(columns=[name + field for name in columns], use_threads=False)

    def _parts(self, named: Sequence[str]) -> Parts:
        """Return the rows of each split, by a column or by file names."""
        total, score_all = sum(self.counts), self._request.data.score_all
        if self.columns.split is not None:
            said = ["" if each is None else str(each) for each in self.rows[self.columns.split]]
            return parts_of(said, total, self.name, score_all=score_all)
        if set(named) == {TRAIN}:
            return parts_of(None, total, self.name)
        found = parts_of(np.repeat(named, self.counts).tolist(), total, self.name, score_all=score_all)
        told = found.description.replace("the rows whose split is val", "the files of validation")
        return found._replace(description=told.replace("the rows whose split is", "the files of"))

    def open_paths(self) -> StoredImages:
        """Open the images of a table of paths relative to its file; raises DataError."""
        base = self.root if self.root.is_dir() else self.paths[0].parent
        folders = np.repeat([os.path.relpath(path.parent, base) for path in self.paths], self.counts).tolist()
        pairs = zip(folders, self.rows[self.columns.image], strict=True)
        ends = np.cumsum(self.counts)

        def where(row: int) -> str:
            file = int(np.searchsorted(ends, row, side="right"))
            inner = row - int(ends[file] - self.counts[file])
            return f"row {inner:,} (counted from 0) of {str(self.paths[file])!r}"

        return open_paths(
            base.absolute(),
            ["" if path is None else os.path.normpath(os.path.join(folder, path)) for folder, path in pairs],
            self._label_cells(),
            self.parts,
            where,
            table=str(self.root),
            request=self._request,
        )

    def _label_cells(self) -> list[Any]:
        """Return the values of the label column, one per row; tuples for numeric columns."""
        cells = [self.rows[name] for name in self.columns.labels]
        return list(zip(*cells, strict=True)) if self._request.data.target_columns else cells[0]

    def labels(self) -> tuple[tuple[str, ...], NDArray[Any]]:
        """Return class names and each row's label, -1 for unused rows; or column names and their numbers.

        Raises:
            DataError: If a row lacks a label or a numeric target.
        """
        self.parts = hold_out_labelled(self.parts, self._label_cells(), self._request)
        parts, request = self.parts.splits, self._request

        def name(row: int) -> str:
            return f"row {row:,} (counted from 0) of {self.root!s}"

        if request.data.target_columns:
            rows = np.sort(np.concatenate(parts))
            numbers = read_numbers(self._label_cells(), rows, name, request, request.problems.add)
            request.refuse_problems()
            return request.data.target_columns, numbers
        numbered: Sequence[NDArray[Any]]
        if request.several_labels:
            classes, numbered = name_rows(self._label_cells(), parts, name, str(self.root))
        else:
            feature = self.features.get(self.columns.labels[0])
            classes, numbered = number_rows(
                self._label_cells(), parts, name, str(self.root), feature, one_class=request.data.score_all
            )
        labels = np.full((sum(self.counts), *numbered[0].shape[1:]), -1, dtype=numbered[0].dtype)
        for part, each in zip(parts, numbered, strict=True):
            labels[part] = each
        return classes, labels

    def names(self, splits: Sequence[str] = (TRAIN, VALIDATION)) -> list[str]:
        """Return each row's name: its path, or else its index in its split."""
        names = [""] * sum(self.counts)
        for split, ids in zip(splits, self.parts.splits, strict=False):
            for place, row in enumerate(ids.tolist()):
                names[row] = f"{split}[{place}]"
        column = self.columns.image
        if self.kind != "struct" or self.schema.field(column).type.get_field_index("path") < 0:
            return names
        tables = [self._read(file, [column], ".path") for file in self.paths]
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
        raise DataError(f"{self.name}: row {row:,} (counted from 0) {advice}, and write the table again.")

    def opened(
        self, source: TableSource, classes: tuple[str, ...], probe: Probe, digest: str, **facts: Any
    ) -> StoredImages:
        """Open the images of the table; ``facts`` are other attributes of :class:`StoredImages`."""
        source.channels = self._request.channels or (1 if probe.greyscale else 3)
        is_whole = self.parts.held_out is None and len(self.parts.train) == len(source)
        return in_splits(
            [source] if is_whole else [SubsetSource(source, each) for each in self.parts.splits],
            self.parts.description,
            self._request.data.validation_fraction,
            classes=classes,
            digest=digest,
            channels=source.channels,
            probe=probe,
            **facts,
        )
