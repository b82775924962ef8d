"""Which images do parquet tables hold, and of which class? Images in the rows, as on the hub, or paths of files."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from paceline.data.image.arrow import mapped, require_pyarrow
from paceline.data.image.columns import Asked, Found, Parts, find_columns, parts_of
from paceline.data.image.labels import as_label, number_classes
from paceline.data.image.listing import Fault
from paceline.data.image.manifest import PathRows, open_paths
from paceline.data.image.mapped import Names, StoredImages
from paceline.data.image.parquet_source import (
    ParquetSource,
    check_in_any_order,
    open_table,
    read_metadata,
    read_schema,
    unreadable,
)
from paceline.data.image.source import Ids, SampleSource, SubsetSource
from paceline.data.image.splits import split_off, stratified_split
from paceline.data.image.table_files import TEST, TRAIN, VALIDATION, files_ending_in, splits_of_files, told_unread
from paceline.errors import DataError, did_you_mean
from paceline.files import LeftOut

_Kind = Literal["bytes", "struct", "path"]


@dataclass(frozen=True)
class _Tables:
    """Parquet files of one table, and what they say of their columns."""

    root: Path
    paths: tuple[Path, ...]
    schema: Any
    features: Mapping[str, Any]

    @property
    def name(self) -> str:
        return repr(str(self.root))

    def classes_of(self, column: str) -> tuple[str, ...]:
        """The names that numbers of a column stand for, if Hugging Face's library has written them down."""
        said = self.features.get(column)
        if not isinstance(said, dict) or said.get("_type") != "ClassLabel":
            return ()
        return tuple(str(name) for name in said.get("names", ()))


def open_parquet(
    path: str | Path,
    *,
    channels: int | None,
    validation_fraction: float,
    asked: Asked,
    fault: Fault | None = None,
    in_any_order: bool = True,
) -> StoredImages:
    """Read the labels, and look at the heads of a few images.

    Args:
        path: A parquet file, a folder of them, or a pattern.
        channels: What images are decoded to, 1 or 3; None for 3 unless all images looked at are greyscale.
        validation_fraction: Share of each class held out where there is no split for that.
        asked: Which columns.
        fault: Told of paths that are wrong, where the table holds paths, if the rest is wanted.
        in_any_order: Whether images will be read in any order, which row groups may be too large for.

    Raises:
        DataError: If there is no such table, or a column or a label is missing.
    """
    left_out = LeftOut()
    tables = _find(path, left_out)
    columns = find_columns(_as_hub(tables, asked), tables.schema.names, tables.name)
    kind = _kind(tables, columns.image)
    named, unread = [TRAIN] * len(tables.paths), ""
    if columns.split is None:
        tables, named, unread = _named(tables)
    counts = [read_metadata(each).num_rows for each in tables.paths]
    if sum(counts) == 0:
        raise DataError(f"{tables.name} has no rows: make the table again.")
    read = [columns.label, *([] if columns.split is None else [columns.split])]
    rows = _read(tables, [*read, *([columns.image] if kind == "path" else [])])
    parts = _parts(tables, columns, rows, counts, named)
    told = "; ".join(each for each in (parts.told or split_off(validation_fraction), unread) if each)
    if kind == "path":
        found = _path_rows(tables, columns, rows, counts, parts)
        images = open_paths(
            found, str(tables.root), channels=channels, validation_fraction=validation_fraction, fault=fault
        )
        return replace(images, left_out=left_out.told())
    classes, labels = _labels(tables, columns, rows, parts)
    source = _source(tables, columns.image, kind, labels, _part_names(parts, len(labels)))
    if in_any_order:
        check_in_any_order(source.table, str(path))
    probe = source.probe()
    if in_any_order:
        source.check_in_any_order(str(path))
    source.channels = channels or (1 if probe.greyscale else 3)
    if parts.held_out is None:
        # Of the rows that are for training: all of them, unless a column says otherwise.
        ids = [parts.train[each] for each in stratified_split(labels[parts.train], validation_fraction)]
    else:
        ids = [parts.train, parts.held_out]
    sources: list[SampleSource] = [SubsetSource(source, each) for each in ids]
    return StoredImages(
        train=sources[0],
        validation=sources[1],
        classes=classes,
        digest=_digest(source, classes, parts),
        split=told,
        is_split_off=parts.held_out is None,
        channels=source.channels,
        probe=probe,
        listing=source.table.told,
        left_out=left_out.told(),
    )


def _find(path: str | Path, left_out: LeftOut) -> _Tables:
    root = Path(path).expanduser()
    if root.is_dir():
        paths = files_ending_in("parquet", root, left_out)
    elif glob.has_magic(str(root)):
        paths = sorted(Path(each) for each in glob.glob(str(root), recursive=True) if not Path(each).is_dir())
    else:
        paths = [root] if root.exists() else []
    if not paths:
        what = "are no .parquet files in it" if root.is_dir() else "is no such file or folder"
        raise DataError(f"data.path is {str(path)!r}, and there {what}: correct the path.")
    schema, features = read_schema(paths[0])
    return _Tables(root, tuple(paths), schema, features)


def _as_hub(tables: _Tables, asked: Asked) -> Asked:
    """What is asked for, or else the one column that Hugging Face's library calls an image, and so on."""
    kinds = {name: said.get("_type") for name, said in tables.features.items() if isinstance(said, dict)}
    for key, kind in (("image", "Image"), ("label", "ClassLabel")):
        named = [name for name, each in kinds.items() if each == kind and name in tables.schema.names]
        if getattr(asked, key) == "auto" and len(named) == 1:
            asked = replace(asked, **{key: named[0]})
    return asked


def _kind(tables: _Tables, column: str) -> _Kind:
    """What a column of images holds.

    Raises:
        DataError: If it is none.
    """
    types, found = require_pyarrow().types, tables.schema.field(column).type
    if types.is_binary(found) or types.is_large_binary(found):
        return "bytes"
    inner = found.field("bytes").type if types.is_struct(found) and found.get_field_index("bytes") >= 0 else None
    if inner is not None and (types.is_binary(inner) or types.is_large_binary(inner)):
        return "struct"
    if types.is_string(found) or types.is_large_string(found):
        return "path"
    others = [each.name for each in tables.schema if types.is_struct(each.type) or types.is_binary(each.type)]
    raise DataError(
        f"{tables.name}: column {column!r} is of the type {found}, but images are bytes, a struct with bytes and path, "
        f"or paths: name another in data.image_column.{did_you_mean(column, others)}"
    )


def _read(tables: _Tables, columns: Sequence[str]) -> Any:
    """The columns of all files, which are those without images."""
    arrow = require_pyarrow()
    found = []
    for path in tables.paths:
        try:
            with arrow.parquet.ParquetFile(mapped(path)) as opened:
                lacking = [name for name in columns if name not in opened.schema_arrow.names]
                if lacking:
                    raise DataError(
                        f"{str(path)!r} lacks the column {lacking[0]!r}, which {str(tables.paths[0])!r} has: make all "
                        "files of the table alike."
                    )
                found.append(opened.read(columns=list(columns), use_threads=False))
        except (OSError, arrow.ArrowException) as error:
            raise unreadable(path, error) from error
    return {name: [value for table in found for value in table.column(name).to_pylist()] for name in columns}


def _named(tables: _Tables) -> tuple[_Tables, list[str], str]:
    """The files of a table that are read, which split each is of, and what is said of those that are not read."""
    base = tables.root if tables.root.is_dir() else Path(os.path.commonpath([each.parent for each in tables.paths]))
    named = splits_of_files(tables.paths, base) if len(tables.paths) > 1 else [TRAIN]
    read = [split in (TRAIN, VALIDATION, TEST) for split in named]
    unread = told_unread(sorted({split for split, known in zip(named, read, strict=True) if not known}))
    paths = tuple(path for path, known in zip(tables.paths, read, strict=True) if known)
    return replace(tables, paths=paths), [split for split, known in zip(named, read, strict=True) if known], unread


def _parts(
    tables: _Tables, columns: Found, rows: Mapping[str, list[Any]], counts: Sequence[int], named: Sequence[str]
) -> Parts:
    """Which rows are whose: as a column says, or else the files' names."""
    if columns.split is not None:
        return parts_of(["" if each is None else str(each) for each in rows[columns.split]], sum(counts), tables.name)
    if set(named) == {TRAIN}:
        return Parts(np.arange(sum(counts)), None, "")
    found = parts_of(np.repeat(named, counts).tolist(), sum(counts), tables.name)
    told = found.told.replace("the rows whose split is val", "the files of validation")
    return replace(found, told=told.replace("the rows whose split is", "the files of"))


def _where(tables: _Tables, counts: Sequence[int], row: int) -> str:
    ends = np.cumsum(counts)
    file = int(np.searchsorted(ends, row, side="right"))
    return f"row {row - int(ends[file] - counts[file]):,} (counted from 0) of {str(tables.paths[file])!r}"


def _path_rows(
    tables: _Tables, columns: Found, rows: Mapping[str, list[Any]], counts: Sequence[int], parts: Parts
) -> PathRows:
    base = tables.root if tables.root.is_dir() else tables.paths[0].parent
    folders = np.repeat([os.path.relpath(path.parent, base) for path in tables.paths], counts).tolist()
    pairs = zip(folders, rows[columns.image], strict=True)
    return PathRows(
        root=base.absolute(),
        paths=["" if path is None else os.path.normpath(os.path.join(folder, path)) for folder, path in pairs],
        labels=rows[columns.label],
        parts=parts,
        where=lambda row: _where(tables, counts, row),
    )


def _labels(
    tables: _Tables, columns: Found, rows: Mapping[str, list[Any]], parts: Parts
) -> tuple[tuple[str, ...], Ids]:
    """Class names, and a label for each row; -1 for rows that are not read."""
    values, classes = rows[columns.label], tables.classes_of(columns.label)
    split = [parts.train] if parts.held_out is None else [parts.train, parts.held_out]
    labels = np.full(len(values), -1, dtype=np.int64)
    found = [[_label(tables, columns.label, values[row], row) for row in part.tolist()] for part in split]
    if classes:
        numbers: dict[int | str, int] = {name: number for number, name in enumerate(classes)}
        numbered = [np.array([_number(tables, label, numbers) for label in each], np.int64) for each in found]
        largest = max(int(each.max()) for each in numbered)
        if largest >= len(classes):
            raise DataError(
                f"{tables.name} has the label {largest} in column {columns.label!r}, but its classes are 0 … "
                f"{len(classes) - 1}: make the table again."
            )
    else:
        classes, numbered = number_classes(found, str(tables.root))
    for part, each in zip(split, numbered, strict=True):
        labels[part] = each
    return classes, labels


def _label(tables: _Tables, column: str, value: object, row: int) -> int | str:
    name = f"row {row:,} (counted from 0) of {tables.root!s}"
    if value is None or value == -1 or value == "":
        raise DataError(
            f"{name!r} has no label in column {column!r} ({value!r}): leave such rows out, or name another column in "
            "data.label_column."
        )
    # A yes or no is a class like any other.
    return str(value).lower() if isinstance(value, bool) else as_label(value, name)


def _number(tables: _Tables, label: int | str, numbers: Mapping[int | str, int]) -> int:
    """The number of a class, which may be written by its name; text is never a number."""
    number = numbers.get(label, label)
    if isinstance(number, str):
        raise DataError(f"{tables.name} has the label {label!r}, which is none of its classes: make the table again.")
    return number


def _part_names(parts: Parts, count: int) -> list[str]:
    """What rows are called that name no file: their place in their split."""
    names = [""] * count
    split = {"train": parts.train, "validation": np.zeros(0, np.int64) if parts.held_out is None else parts.held_out}
    for name, ids in split.items():
        for place, row in enumerate(ids.tolist()):
            names[row] = f"{name}[{place}]"
    return names


def _source(tables: _Tables, column: str, kind: _Kind, labels: Ids, names: list[str]) -> ParquetSource:
    table = open_table(tables.paths, column, f"{column}.bytes" if kind == "struct" else column)
    type_ = tables.schema.field(column).type
    if kind == "struct" and type_.get_field_index("path") >= 0:
        paths = _read_paths(tables, column)
        names = [path or name for path, name in zip(paths, names, strict=True)]
    _check_present(tables, table, names)
    return ParquetSource(table, labels, Names.of(names))


def _read_paths(tables: _Tables, column: str) -> list[str | None]:
    arrow = require_pyarrow()
    found: list[str | None] = []
    for path in tables.paths:
        with arrow.parquet.ParquetFile(mapped(path)) as opened:
            table = opened.read(columns=[f"{column}.path"], use_threads=False)
        for piece in table.column(column).chunks:
            found += piece.field("path").to_pylist()
    return found


def _check_present(tables: _Tables, table: Any, names: Sequence[str]) -> None:
    """Refuse rows without an image, as far as the files' ends tell of them."""
    starts = np.cumsum([0, *(group.rows for group in table.groups)])
    for group, (begin, end) in zip(table.groups, pairwise(starts.tolist()), strict=True):
        if group.nulls == 0:
            continue
        arrow, path = require_pyarrow(), table.files[group.file].path
        with arrow.parquet.ParquetFile(mapped(path)) as opened:
            rows = opened.read_row_group(group.number, columns=[table.leaf], use_threads=False)
        images = rows.column(table.column).combine_chunks()
        images = images.field("bytes") if table.leaf != table.column else images
        row = begin + images.is_null().to_pylist().index(True)
        is_path = group.nulls == end - begin and table.leaf != table.column
        advice = (
            f"names a file, {names[row]!r}, in place of holding an image: embed the images, or name a column of paths"
            if is_path
            else "has no image: leave such rows out"
        )
        raise DataError(f"{tables.name}: row {row:,} (counted from 0) {advice}, and write the table again.")


def _digest(source: ParquetSource, classes: Sequence[str], parts: Parts) -> str:
    digest = hashlib.sha256(source.digest().encode() + "\0".join(classes).encode())
    for ids in (parts.train, parts.held_out):
        digest.update(b"-" if ids is None else ids.astype("<i8").tobytes())
    return digest.hexdigest()
