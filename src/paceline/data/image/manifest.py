"""Tables of paths and labels: a CSV or TSV file, or columns of a parquet table."""

from __future__ import annotations

import csv
import hashlib
import os
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.data.image.columns import Asked, Parts, find_columns, parts_of
from paceline.data.image.dataset import StoredImages, in_splits
from paceline.data.image.folder import probe_files
from paceline.data.image.labels import as_label, number_classes
from paceline.data.image.listing import Fault, Names, Problems
from paceline.data.image.source import FileSource, Ids
from paceline.errors import DataError
from paceline.escaping import text_of_cell
from paceline.files import odd_kind, refuse_odd_kinds

# Normalising a path, as of a table in a folder, takes one of the slashes away.
_ADDRESS = re.compile(r"(\./)?[A-Za-z][A-Za-z0-9+.-]+:/")
_LARGEST_HEAD = 2**16


@dataclass(frozen=True)
class PathRows:
    """Rows of a table that names image files.

    Attributes:
        root: The folder that the paths are relative to.
        paths: One for each row.
        labels: As they are written.
        parts: Which rows belong to which split.
        where: Names a row for people.
    """

    root: Path
    paths: Sequence[str]
    labels: Sequence[object]
    parts: Parts
    where: Callable[[int], str]


def open_csv(
    path: str | Path, *, channels: int | None, validation_fraction: float, asked: Asked, fault: Fault | None = None
) -> StoredImages:
    """Read a table of paths and labels, and look at the heads of a few images.

    Args:
        path: A file with a first line that names its columns, which are separated by commas, semicolons or tabs.
        channels: What the files are decoded to, 1 or 3; None for 3 unless all images looked at are greyscale.
        validation_fraction: Share of each class held out where no row is of a split for that.
        asked: Which columns.
        fault: Told of each row that names no file, or one that another row names, if the rest is wanted.

    Raises:
        DataError: If it cannot be read, or a column, a label or a path is missing.
    """
    file = Path(path).expanduser()
    header, rows, lines = _read(file)
    columns = find_columns(asked, header, repr(str(file)))
    image, label = header.index(columns.image), header.index(columns.label)
    splits = None if columns.split is None else [row[header.index(columns.split)] for row in rows]

    def where(row: int) -> str:
        return f"line {lines[row]} of {str(file)!r}"

    found = PathRows(
        root=file.absolute().parent,
        paths=[text_of_cell(row[image].strip()) for row in rows],
        labels=[text_of_cell(row[label].strip()) for row in rows],
        parts=parts_of(splits, len(rows), repr(str(file))),
        where=where,
    )
    return open_paths(found, str(file), channels=channels, validation_fraction=validation_fraction, fault=fault)


def open_paths(
    rows: PathRows, table: str, *, channels: int | None, validation_fraction: float, fault: Fault | None
) -> StoredImages:
    """Open the images that rows name.

    Args:
        rows: The rows.
        table: The table's path, for messages.
        channels: See :func:`open_csv`.
        validation_fraction: See :func:`open_csv`.
        fault: See :func:`open_csv`.

    Raises:
        DataError: See :func:`open_csv`.
    """
    parts = rows.parts.splits
    problems = Problems()
    sizes = _sizes(rows, np.concatenate(parts), problems)
    problems.tell(fault)
    parts = [part[sizes[part] >= 0] for part in parts]
    if not all(len(part) for part in parts):
        raise DataError(f"{table!r} names no image that is there: correct the paths in it.")
    labels = [[_label(rows.labels[row], rows.where(row)) for row in part.tolist()] for part in parts]
    classes, numbered = number_classes(labels, table)
    names = [os.fsencode(each) for each in rows.paths]
    listed = [Names.of(names[row] for row in part.tolist()) for part in parts]
    probe = probe_files(rows.root, listed[0])
    channels = channels or (1 if probe.greyscale else 3)
    whole = [FileSource(rows.root, each, label, channels) for each, label in zip(listed, numbered, strict=True)]
    digest = hashlib.sha256()
    for part, numbers in zip(parts, numbered, strict=True):
        lines = (b"%s\0%d\0%d\n" % (names[row], sizes[row], label) for row, label in zip(part, numbers, strict=True))
        digest.update(b"".join(lines) + b"\0")
    digest.update("\0".join(classes).encode())
    return in_splits(
        whole,
        rows.parts.told,
        validation_fraction,
        classes=classes,
        digest=digest.hexdigest(),
        channels=channels,
        probe=probe,
    )


def _read(file: Path) -> tuple[list[str], list[list[str]], list[int]]:
    """The header, the rows, and the line that each row ends at."""
    refuse_odd_kinds(file)
    try:
        with open(file, encoding="utf-8-sig", newline="") as opened:
            first = opened.readline(_LARGEST_HEAD)
            opened.seek(0)
            delimiter = "\t" if file.suffix.lower() in (".tsv", ".tab") else max(",;\t", key=first.count)
            reader = csv.reader(opened, delimiter=delimiter, strict=True)
            header = [name.strip() for name in next(reader, [])]
            rows, lines = [], []
            for row in reader:
                if row:
                    rows.append(row)
                    lines.append(reader.line_num)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        if isinstance(error, UnicodeDecodeError):
            reason = f"it is not in UTF-8: {reason}; save it again in that encoding"
        raise DataError(
            f"data.path is {str(file)!r}, which cannot be read as a table of paths and labels ({reason}): correct it, "
            "or the path."
        ) from None
    _check(file, header, rows, lines)
    return header, rows, lines


def _check(file: Path, header: list[str], rows: list[list[str]], lines: list[int]) -> None:
    if not rows:
        raise DataError(f"{str(file)!r} has no rows: expected is a line of column names, and one for each image.")
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise DataError(f"{str(file)!r} has two columns called {twice[0]!r}: rename one of them.")
    for row, line in zip(rows, lines, strict=True):
        if len(row) != len(header):
            raise DataError(
                f"line {line} of {str(file)!r} has {len(row)} fields, but its first line names {len(header)} columns "
                f"({', '.join(header)}): a field with a separator in it stands in quotation marks."
            )


def _sizes(rows: PathRows, wanted: Ids, problems: Problems) -> Ids:
    """The length in bytes of the file that each row names; -1 for those that are left out."""
    sizes = np.full(len(rows.paths), -1, dtype=np.int64)
    seen: dict[str, int] = {}
    for row in np.sort(wanted).tolist():
        path = rows.paths[row]
        whole = os.path.normpath(os.path.join(rows.root, path))
        if not path:
            problems.add("{} names no image: give its path, or remove the line.", rows.where(row))
        elif _ADDRESS.match(path):
            # Not repeated: an address may hold a password.
            problems.add(
                "{} names an address, and a table names files: copy the images here, and give paths from the table on.",
                rows.where(row),
            )
        elif whole in seen:
            where, otherwise = rows.where(seen[whole]), _otherwise(rows, seen[whole], row)
            sentence = "{} names {}, which {} names too{}: keep one of them."
            problems.add(sentence, rows.where(row), repr(path), where, otherwise)
        elif (size := _size(whole)) is None:
            if kind := odd_kind(whole):
                sentence = "{} names {}, which is {}: correct it, or remove the line."
                problems.add(sentence, rows.where(row), repr(path), kind)
            else:
                sentence = "{} names {}, but there is no file {}: correct it, or remove the line."
                problems.add(sentence, rows.where(row), repr(path), repr(whole))
        else:
            seen[whole] = row
            sizes[row] = size
    return sizes


def _otherwise(rows: PathRows, first: int, second: int) -> str:
    one, other = rows.labels[first], rows.labels[second]
    return "" if one == other else f", with the label {one!r} there and {other!r} here"


def _size(path: str) -> int | None:
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # a name with a zero byte in it
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _label(value: object, name: str) -> int | str:
    if value is None or value == "":
        raise DataError(f"{name} has no label: give one, or remove the line.")
    return as_label(value, name)
