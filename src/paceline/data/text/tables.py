"""Tables of texts: CSV, JSON lines, parquet, and folders that Hugging Face's ``save_to_disk`` wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceline.data.image.sets.csv import read_csv
from paceline.data.image.sets.huggingface import HuggingFaceFiles, choose_splits, find_files
from paceline.data.image.tables import find_column, mapped, parts_of, reading, require_pyarrow, splits_of_files
from paceline.data.text.corpus import split_by_name
from paceline.errors import DataError
from paceline.escaping import text_of_cell
from paceline.files import LeftOut, has_ending, refuse_odd_kinds, visible
from paceline.plain_json import load_json
from paceline.recipe.data import Data

_ENDINGS = ("csv", "tsv", "tab", "jsonl")
_KINDS = "a .csv, .tsv, .jsonl or .parquet file, a folder of them, or a folder that save_to_disk wrote"

Choose = Callable[[Sequence[str], Mapping[str, Any], str], Sequence[str]]
"""Chooses columns: called with all of them, Hugging Face's metadata of each, and the table's name for messages."""


class Row(NamedTuple):
    """The cells of the chosen columns, and the row's name: ``line 3 of 'train.csv'``."""

    name: str
    cells: tuple[Any, ...]


class TextTable(NamedTuple):
    """Rows of a table.

    Attributes:
        train: Training rows.
        held_out: Held-out rows.
        reason: Origin of the held-out rows, if ``data.validation_fraction`` has no effect.
        features: Hugging Face's metadata of each column.
    """

    train: list[Row]
    held_out: list[Row]
    reason: str | None
    features: Mapping[str, Any]


def read_table(data: Data, choose: Choose, left_out: LeftOut) -> TextTable:
    """Read the chosen columns of the table at ``data.path``.

    Rows are held out if their file, folder or split column says so. Otherwise ``data.validation_fraction`` of them is
    held out, by their names: adding a row to the end changes nothing for the others.

    Args:
        data: The recipe's section.
        choose: Chooses the columns; raises DataError if one is missing.
        left_out: Receives unused files.

    Raises:
        DataError: If there is no such table, or it cannot be read.
    """
    if data.path is None:
        raise DataError(f"data.dataset={data.dataset} needs data.path: {_KINDS}.")
    root = Path(data.path).expanduser()
    files = _plain_files(root, left_out) or find_files(root, left_out)
    if files is None:
        raise DataError(f"data.path={root} is not a table of text: give {_KINDS}.")
    train, held_out, reason = choose_splits(files)

    def rows_of(split: str, split_column: str | None) -> tuple[list[Row], list[str] | None]:
        rows, words = list[Row](), list[Any]()
        for file in files.splits[split]:
            names, read = _opened(file, is_parquet=files.is_parquet)
            word = find_column("split", split_column, names, repr(str(file)))
            chosen = choose(names, files.features, repr(str(file)))
            for line, cells in read([*chosen, *([] if word is None else [word])]):
                name = f"{split}[{len(rows)}]" if line is None else f"line {line} of {file.name!r}"
                rows.append(Row(name, tuple(cells[: len(chosen)])))
                words.append(str(cells[-1]) if word is not None else None)
        return rows, None if None in words else words

    if held_out is not None:
        return TextTable(rows_of(train, None)[0], rows_of(held_out, None)[0], reason, files.features)
    rows, words = rows_of(train, data.split_column)
    if not rows:
        raise DataError(f"data.path={root} has no rows.")
    parts = parts_of(words, len(rows), repr(str(root)))
    if parts.held_out is None:
        return TextTable(*split_by_name(rows, data.validation_fraction), None, files.features)
    of_split = [[rows[row] for row in part.tolist()] for part in parts.splits]
    return TextTable(of_split[0], of_split[1], parts.told, files.features)


def _plain_files(root: Path, left_out: LeftOut) -> HuggingFaceFiles | None:
    """Return a CSV or JSON lines file, or those in a folder by split; None if there are none."""
    if not root.is_dir():
        splits = {"train": [root]} if has_ending(root.name, _ENDINGS) else {}
        return HuggingFaceFiles(root=root, splits=splits, is_parquet=False, features={}) if splits else None
    names = sorted(entry.name for entry in visible(root))
    paths = [root / name for name in names if has_ending(name, _ENDINGS)]
    for name in names if paths else ():
        if not has_ending(name, _ENDINGS):
            left_out.add("files that are not tables", name)
    splits = {}
    for path, split in zip(paths, splits_of_files(paths, root), strict=True):
        splits.setdefault(split, []).append(path)
    return HuggingFaceFiles(root=root, splits=splits, is_parquet=False, features={}) if paths else None


def _opened(file: Path, *, is_parquet: bool) -> tuple[Sequence[str], Callable[[Sequence[str]], Iterator[_Cells]]]:
    """Return a table's column names, and a function that reads some of its columns."""
    if not has_ending(file.name, _ENDINGS):
        columns = arrow_schema(file, is_parquet=is_parquet).names
        return columns, lambda names: ((None, cells) for cells in arrow_rows(file, names, is_parquet=is_parquet))
    if has_ending(file.name, ("jsonl",)):
        if not (records := list(_json_lines(file))):
            raise DataError(f"{str(file)!r} has no rows; check data.path.")
        return list(records[0][1]), lambda names: _cells_of(records, names, file)
    header, rows, lines = read_csv(file)

    def read(names: Sequence[str]) -> Iterator[_Cells]:
        places = [header.index(name) for name in names]
        return ((line, [text_of_cell(row[at]) for at in places]) for line, row in zip(lines, rows, strict=True))

    return header, read


_Cells = tuple[int | None, Sequence[Any]]


def _json_lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    refuse_odd_kinds(file)
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    record = load_json(line)
                    if not isinstance(record, dict):
                        raise ValueError(f"line {number} holds a {type(record).__name__}, not an object")
                    yield number, record
    except (OSError, ValueError) as error:
        raise DataError(f"{str(file)!r} cannot be read as JSON lines ({error}): correct it.") from error


def _cells_of(records: Sequence[tuple[int, dict[str, Any]]], names: Sequence[str], file: Path) -> Iterator[_Cells]:
    for number, record in records:
        if missing := [name for name in names if name not in record]:
            raise DataError(f"line {number} of {str(file)!r} has no {missing[0]!r}, which line {records[0][0]} has.")
        yield number, [record[name] for name in names]


def arrow_schema(file: Path, *, is_parquet: bool) -> Any:
    """Return the schema of a parquet file or an Arrow stream, in pyarrow's form."""
    arrow = require_pyarrow()
    refuse_odd_kinds(file)
    with reading(file), mapped(file) as content:
        if is_parquet:
            with arrow.parquet.ParquetFile(content) as opened:
                return opened.schema_arrow
        with arrow.ipc.open_stream(content) as stream:
            return stream.schema


def arrow_rows(file: Path, names: Sequence[str], *, is_parquet: bool) -> Iterator[tuple[Any, ...]]:
    """Yield the cells of some columns of a parquet file or an Arrow stream, row by row."""
    arrow = require_pyarrow()
    with reading(file), mapped(file) as content:
        if is_parquet:
            with arrow.parquet.ParquetFile(content) as opened:
                for batch in opened.iter_batches(columns=list(names)):
                    yield from zip(*(batch.column(name).to_pylist() for name in names), strict=True)
        else:
            with arrow.ipc.open_stream(content) as stream:
                for batch in stream:
                    batch.validate(full=True)
                    yield from zip(*(batch.column(name).to_pylist() for name in names), strict=True)
