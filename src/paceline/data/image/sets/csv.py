"""Tables of paths and labels: CSV or TSV files."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from paceline.data.image.dataset import DatasetRequest, StoredImages
from paceline.data.image.sets import IMAGENET, TABLE
from paceline.data.image.tables import file_problem, find_columns, open_paths, parts_of
from paceline.dataset_registry import dataset
from paceline.errors import DataError
from paceline.escaping import text_of_cell
from paceline.files import refuse_archive, refuse_special_inputs

_LARGEST_HEAD = 2**16


@dataset("csv", keys=(*TABLE, "target_columns", "split_column"), size=IMAGENET)
def open_csv(request: DatasetRequest) -> StoredImages:
    """Read a table of paths and labels, and probe the headers of a few images.

    The first line names the columns, separated by commas, semicolons or tabs.

    Raises:
        DataError: If it cannot be read, or a column, a label or a path is missing.
    """
    file = request.path
    header, rows, lines = read_csv(file)
    columns = find_columns(request.data, header, repr(str(file)))
    image, labels = header.index(columns.image), [header.index(each) for each in columns.labels]
    splits = None if columns.split is None else [row[header.index(columns.split)] for row in rows]

    cells = [tuple(text_of_cell(row[each].strip()) for each in labels) for row in rows]

    def where(row: int) -> str:
        return f"line {lines[row]} of {str(file)!r}"

    return open_paths(
        file.absolute().parent,
        [text_of_cell(row[image].strip()) for row in rows],
        cells if request.data.target_columns else [each[0] for each in cells],
        parts_of(splits, len(rows), repr(str(file)), score_all=request.data.score_all),
        where,
        table=str(file),
        request=request,
    )


def read_csv(file: Path) -> tuple[list[str], list[list[str]], list[int]]:
    """Return the header of a CSV or TSV file, the rows, and the line in which each begins.

    Raises:
        DataError: If it cannot be read, has no rows, or a row does not fit the header.
    """
    refuse_special_inputs(file)
    refuse_archive(file)
    csv.field_size_limit(sys.maxsize)
    try:
        with open(file, encoding="utf-8-sig", newline="") as opened:
            first = opened.readline(_LARGEST_HEAD)
            opened.seek(0)
            reader = csv.reader(opened, delimiter=_delimiter(file, first), strict=True)
            rows, lines, begin = [], [], 1
            header = [name.strip() for name in next(reader, [])]
            begin += reader.line_num
            for row in reader:
                if row:
                    rows.append(row)
                    lines.append(begin)
                begin = reader.line_num + 1
    except UnicodeDecodeError:
        raise DataError(file_problem(file)) from None
    except (OSError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else f"line {reader.line_num}: {error}"
        if isinstance(error, csv.Error) and begin < reader.line_num:
            reason = f"line {begin}: a quotation mark opens a field that does not end there; {reason}"
        raise DataError(f"the table {str(file)!r} cannot be read ({reason}): correct it, or the path.") from None
    if not rows:
        reason = "has no rows: expected a line of column names and one line for each sample."
        raise DataError(file_problem(file) or f"{str(file)!r} {reason}")
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise DataError(f"{str(file)!r} has two columns called {twice[0]!r}: rename one of them.")
    for row, line in zip(rows, lines, strict=True):
        if len(row) != len(header):
            raise DataError(
                f"line {line} of {str(file)!r} has {len(row)} fields, but its first line names {len(header)} columns "
                f"({', '.join(header)}): put a field that contains a separator in quotation marks."
            )
    return header, rows, lines


def _delimiter(file: Path, first: str) -> str:
    if first.startswith("sep="):
        raise DataError(f"{str(file)!r} begins with {first.strip()!r}, a line for Excel: remove it.")
    return "\t" if file.suffix.lower() in (".tsv", ".tab") else max(",;\t", key=first.count)
