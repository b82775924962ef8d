"""Tables of texts: CSV, JSON lines, parquet, and folders that Hugging Face's ``save_to_disk`` wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceline.data.tables import (
    FORMATS,
    PLAIN_TEXTS,
    DataTable,
    TableFile,
    TableFiles,
    by_split,
    choose_splits,
    find_files,
)
from paceline.errors import DataError
from paceline.parsing.files import SkippedItems, has_extension, visible_entries
from paceline.recipe.data import Data
from paceline_text.corpus import Split, split_by_name

ENDINGS = tuple(f".{each}" for each in FORMATS)
_KINDS = "a .csv, .tsv, .jsonl or .parquet file, a folder of them, or a folder that save_to_disk wrote"

Choose = Callable[[Sequence[str], Mapping[str, Any], str], Sequence[str]]
"""Chooses columns: called with all of them, Hugging Face's metadata of each, and the table's name for messages."""


class NamedRow(NamedTuple):
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

    train: list[NamedRow]
    held_out: list[NamedRow]
    reason: str | None
    features: Mapping[str, Any]


def read_table(
    data: Data,
    choose: Choose,
    left_out: SkippedItems,
    split: Callable[[list[NamedRow], float], Split[NamedRow]] = split_by_name,
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
            f"{_KINDS}.",
            key="data.path",
            path=data.path,
        )
    train, held_out, reason = choose_splits(files, left_out, score_all=data.score_all)

    def read(split: str, split_column: str | None) -> tuple[DataTable, list[NamedRow]]:
        opened = [TableFile(path, FORMATS.get(path.suffix[1:].lower(), files.format)) for path in files.splits[split]]
        table = DataTable(
            repr(str(root)),
            opened,
            lambda file: choose(file.schema.names, files.features, repr(str(file.path))),
            split_column=split_column,
            score_all=data.score_all,
        )
        places = [(file, number) for file, count in zip(opened, table.counts, strict=True) for number in range(count)]
        names = (f"row {number + 1} of {file.path.name!r}" for file, number in places)
        return table, list(map(NamedRow, names, table.rows))

    if held_out is not None:
        rows = read(held_out, None)[1]
        return TextTable(rows if data.score_all else read(train, None)[1], rows, reason, files.features)
    table, rows = read(train, data.split_column)
    parts = table.parts
    if parts.held_out is None:
        return TextTable(*split(rows, data.validation_fraction), reason or None, files.features)
    train_rows, held_out_rows = ([rows[row] for row in part.tolist()] for part in parts.splits)
    return TextTable(held_out_rows if data.score_all else train_rows, held_out_rows, parts.description, files.features)


def _plain_files(root: Path, left_out: SkippedItems) -> TableFiles | None:
    """Return a CSV or JSON lines file, or those in a folder by split; None if there are none."""
    if not root.is_dir():
        splits = {"train": [root]} if has_extension(root.name, PLAIN_TEXTS) else {}
        return TableFiles(root=root, splits=splits, format="csv", features={}) if splits else None
    names = sorted(entry.name for entry in visible_entries(root))
    paths = [root / name for name in names if has_extension(name, PLAIN_TEXTS)]
    for name in names if paths else ():
        if not has_extension(name, PLAIN_TEXTS):
            left_out.add("files that are not tables", name)
    return TableFiles(root=root, splits=by_split(paths, root), format="csv", features={}) if paths else None
