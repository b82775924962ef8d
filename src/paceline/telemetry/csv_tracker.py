"""How does a run appear as tables? One CSV file for each kind of record, for spreadsheets and data frames.

Columns keep their names and places: a number that a record brings for the first time is a new last column, empty in the
rows before. Objects within records are columns by dotted names, and None is an empty field.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.escaping import csv_cell
from paceline.records.append_file import AppendFile
from paceline.records.writer import parse_line
from paceline.telemetry.scalars import flat

# First in every table, where a record has them.
_FIRST = ("step", "position", "time", "epoch", "samples", "split", "weights")


class CsvTracker:
    """Writes each record as a row of its kind's file: ``step.csv``, ``evaluation.csv``, ….

    A run that goes on begins with the tables that its ``events.jsonl`` gives, which was cut back to where it goes on
    from: no row is missing and none is there twice, also of launches that asked for no tables.

    Args:
        directory: The folder of the tables.
        events: The run's ``events.jsonl``, of which what is there now is read when the first record comes.
    """

    def __init__(self, directory: Path, events: Path) -> None:
        self._directory = directory
        self._events = events
        self._known_bytes = events.stat().st_size if events.is_file() else 0
        self._columns: dict[str, list[str]] = {}
        self._files: dict[str, AppendFile] = {}
        self._is_begun = False

    def write(self, event: Mapping[str, Any]) -> None:
        """Add one record to its table."""
        if not self._is_begun:
            self._is_begun = True
            self._begin()
        kind, row = str(event["event"]), _row(event)
        if kind not in self._files or not row.keys() <= set(self._columns[kind]):
            self._widen(kind, row)
        self._files[kind].write(_encoded([row], self._columns[kind]).encode())
        # Records are rare, and people follow a table while it grows.
        self._files[kind].flush()

    def close(self, seconds: float = 0.0) -> None:
        """Close the files; that takes no time worth limiting."""
        while self._files:
            self._files.popitem()[1].close()

    def _begin(self) -> None:
        """Put the tables where the run's records stand; row by row, since a long run has millions."""
        for stale in self._directory.glob("*.csv*"):
            stale.unlink()
        columns: dict[str, dict[str, None]] = {}
        for kind, row in self._earlier():
            columns.setdefault(kind, _first_of(row)).update(dict.fromkeys(row))
        self._columns = {kind: list(each) for kind, each in columns.items()}
        for kind in self._columns:
            self._open(kind)
        for kind, row in self._earlier():
            self._files[kind].write(_encoded([row], self._columns[kind]).encode())
        for file in self._files.values():
            file.flush()

    def _earlier(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The kind and the row of each record that was there when the run went on."""
        left, number = self._known_bytes, 0
        if not left:
            return
        with self._events.open("rb") as file:
            while line := file.readline(left):
                left, number = left - len(line), number + 1
                event = parse_line(line, self._events, number, is_last=left == 0)
                if event is not None:
                    yield str(event["event"]), _row(event)

    def _open(self, kind: str) -> None:
        """Begin a table with its head."""
        self._files[kind] = AppendFile(self._directory / f"{kind}.csv")
        self._files[kind].write(_encoded([], self._columns[kind], head=True).encode())

    def _widen(self, kind: str, row: Mapping[str, Any]) -> None:
        """Give a table a row's columns: a new one, or another in place of the one that there is, in one move."""
        if kind not in self._files:
            self._columns[kind] = list(_first_of(row) | dict.fromkeys(row))
            self._open(kind)
            return
        self._files.pop(kind).close()
        self._columns[kind] = list(dict.fromkeys((*self._columns[kind], *row)))
        path, wider = self._directory / f"{kind}.csv", self._directory / f"{kind}.csv.partial"
        with (
            path.open(encoding="utf-8", newline="") as before,
            wider.open("w", encoding="utf-8", newline="") as after,
        ):
            writer = csv.DictWriter(after, self._columns[kind], restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(csv.DictReader(before))
        wider.replace(path)
        self._files[kind] = AppendFile(path)


def _first_of(row: Mapping[str, Any]) -> dict[str, None]:
    return dict.fromkeys(each for each in _FIRST if each in row)


def _row(event: Mapping[str, Any]) -> dict[str, Any]:
    """A record's fields by column, with what has no place in a table as JSON."""
    found = flat({key: value for key, value in event.items() if key != "event"})
    return {
        key: json.dumps(each) if isinstance(each, list | dict | bool) else csv_cell(each) for key, each in found.items()
    }


def _encoded(rows: list[dict[str, Any]], columns: list[str], *, head: bool = False) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    if head:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
