"""Tables of texts: CSV, JSON lines, parquet, and folders that Hugging Face's ``save_to_disk`` wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from paceline.data.image.sets.csv import read_csv
from paceline.data.image.sets.huggingface import HuggingFaceFiles, choose_splits, find_files
from paceline.data.image.tables import explain_errors, find_column, mapped, parts_of, require_pyarrow, splits_of_files
from paceline.data.text.corpus import Split, split_by_name
from paceline.errors import DataError
from paceline.files import SkippedItems, has_extension, refuse_archive, refuse_special_inputs, visible_entries
from paceline.recipe.data import Data

_LINES, _SEPARATED = ("jsonl",), ("csv", "tsv", "tab")
_ENDINGS = (*_SEPARATED, *_LINES)
ENDINGS = tuple(f".{each}" for each in (*_ENDINGS, "parquet"))
_KINDS = "a .csv, .tsv, .jsonl or .parquet file, a folder of them, or a folder that save_to_disk wrote"

Choose = Callable[[Sequence[str], Mapping[str, Any], str], Sequence[str]]
"""Chooses columns: called with all of them, Hugging Face's metadata of each, and the table's name for messages."""


class Row(NamedTuple):
    """The cells of the chosen columns, and the row's name: ``row 3 of 'train.csv'``, counted from 1."""

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


def read_table(
    data: Data, choose: Choose, left_out: SkippedItems, split: Callable[[list[Row], float], Split[Row]] = split_by_name
) -> TextTable:
    """Read the chosen columns of the table at ``data.path``.

    Rows are held out if their file, folder or split column says so. Otherwise ``data.validation_fraction`` of them is
    held out, by default by their names: adding a row to the end changes nothing for the others.

    Args:
        data: The recipe's section.
        choose: Chooses the columns; raises DataError if one is missing.
        left_out: Receives unused files.
        split: Splits rows, given that fraction.

    Raises:
        DataError: If there is no such table, or it cannot be read.
    """
    root = Path(data.path or "").expanduser()
    files = None if data.path is None else _plain_files(root, left_out) or find_files(root, left_out)
    if files is None:
        raise DataError(
            f"data.path={data.path} is not a table of text, or does not exist: data.dataset={data.dataset} takes "
            f"{_KINDS}."
        )
    train, held_out, reason = choose_splits(files, left_out, score_all=data.score_all)

    def rows_of(split: str, split_column: str | None) -> tuple[list[Row], list[str] | None]:
        rows, words = list[Row](), list[str]()
        for file in files.splits[split]:
            where, has_words = repr(str(file)), False

            def pick(schema: Any, where: str = where) -> list[str]:
                nonlocal has_words
                word = find_column("split", split_column, schema.names, where)
                has_words = word is not None
                return [*choose(schema.names, files.features, where), *([] if word is None else [word])]

            for number, cells in enumerate(cells_of(file, pick, is_parquet=files.is_parquet)):
                rows.append(Row(f"row {number + 1} of {file.name!r}", cells[: len(cells) - has_words]))
                words += [str(cells[-1])] * has_words
        if 0 < len(words) < len(rows):
            raise DataError(
                f"{str(root)!r} has tables with a split column and tables without: give all of them one, or set "
                "data.split_column=off."
            )
        return rows, words or None

    if held_out is not None:
        rows = rows_of(held_out, None)[0]
        return TextTable(rows if data.score_all else rows_of(train, None)[0], rows, reason, files.features)
    rows, words = rows_of(train, data.split_column)
    parts = parts_of(words, len(rows), repr(str(root)), score_all=data.score_all)
    if parts.held_out is None:
        return TextTable(*split(rows, data.validation_fraction), reason or None, files.features)
    train_rows, held_out_rows = ([rows[row] for row in part.tolist()] for part in parts.splits)
    return TextTable(held_out_rows if data.score_all else train_rows, held_out_rows, parts.description, files.features)


def _plain_files(root: Path, left_out: SkippedItems) -> HuggingFaceFiles | None:
    """Return a CSV or JSON lines file, or those in a folder by split; None if there are none."""
    if not root.is_dir():
        splits = {"train": [root]} if has_extension(root.name, _ENDINGS) else {}
        return HuggingFaceFiles(root=root, splits=splits, is_parquet=False, features={}) if splits else None
    names = sorted(entry.name for entry in visible_entries(root))
    paths = [root / name for name in names if has_extension(name, _ENDINGS)]
    for name in names if paths else ():
        if not has_extension(name, _ENDINGS):
            left_out.add("files that are not tables", name)
    splits = {}
    for path, split in zip(paths, splits_of_files(paths, root), strict=True):
        splits.setdefault(split, []).append(path)
    return HuggingFaceFiles(root=root, splits=splits, is_parquet=False, features={}) if paths else None


def cells_of(file: Path, pick: Callable[[Any], Sequence[str]], *, is_parquet: bool) -> Iterator[tuple[Any, ...]]:
    """Yield each row's cells of some columns of a CSV, JSON lines or parquet file, or an Arrow stream.

    Args:
        file: The file.
        pick: Chooses columns from the table's schema, pyarrow's; of CSV, it has only their ``names``.
        is_parquet: Whether a file without another known ending is a parquet file.

    Raises:
        DataError: If it cannot be read, or pyarrow is missing, which CSV does without.
    """
    if has_extension(file.name, _SEPARATED):
        header, rows, _ = read_csv(file)
        columns = [header.index(name) for name in pick(SimpleNamespace(names=header))]
        yield from (tuple(row[each] for each in columns) for row in rows)
        return
    arrow = require_pyarrow()
    refuse_special_inputs(file)
    refuse_archive(file)
    with explain_errors(file), mapped(file) as content:
        if has_extension(file.name, _LINES):
            # A line must fit into a block, and a block's text into an array.
            block_size = min(max(2**20, content.size()), 2**30)
            read_json = partial(arrow.json.read_json, content, arrow.json.ReadOptions(block_size=block_size))
            table = read_json()
            if dates := [each for each in table.schema if arrow.types.is_timestamp(each.type)]:  # they are text
                content.seek(0)
                texts = arrow.schema([each.with_type(arrow.string()) for each in dates])
                table = read_json(arrow.json.ParseOptions(explicit_schema=texts)).select(table.schema.names)
        elif is_parquet:
            opened = arrow.parquet.ParquetFile(content)
            table = opened.read(columns=list(pick(opened.schema_arrow)))
        else:
            table = arrow.ipc.open_stream(content).read_all()
        table.validate(full=True)
        yield from zip(*(table.column(name).to_pylist() for name in pick(table.schema)), strict=True)
