"""How does a run appear as tables? One CSV file for each kind of record, for spreadsheets and data frames.

Columns keep their names and places: a number that a record brings for the first time is a new last column, empty in the
rows before. Objects within records are columns by dotted names, and None is an empty field.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.records.append_file import AppendFile
from paceline.records.run_directory import write_text
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
        if kind not in self._files:
            self._write_table(kind, [row])
            return
        if not row.keys() <= set(self._columns[kind]):
            self._write_table(kind, [*self._read_table(kind), row])
            return
        self._files[kind].write(_encoded([row], self._columns[kind]).encode())
        # Records are rare, and people follow a table while it grows.
        self._files[kind].flush()

    def close(self, seconds: float = 0.0) -> None:
        """Close the files; that takes no time worth limiting."""
        while self._files:
            self._files.popitem()[1].close()

    def _begin(self) -> None:
        """Put the tables where the run's records stand."""
        for stale in self._directory.glob("*.csv"):
            stale.unlink()
        rows: dict[str, list[dict[str, Any]]] = {}
        for event in self._earlier():
            rows.setdefault(str(event["event"]), []).append(_row(event))
        for kind, each in rows.items():
            self._write_table(kind, each)

    def _earlier(self) -> list[dict[str, Any]]:
        if not self._known_bytes:
            return []
        with self._events.open("rb") as file:
            lines = file.read(self._known_bytes).splitlines(keepends=True)
        found = [
            parse_line(line, self._events, number, is_last=number == len(lines))
            for number, line in enumerate(lines, start=1)
        ]
        return [event for event in found if event is not None]

    def _write_table(self, kind: str, rows: list[dict[str, Any]]) -> None:
        """Write a table in one move, and go on at its end."""
        if kind in self._files:
            self._files.pop(kind).close()
        known = dict.fromkeys(self._columns.get(kind, ()))
        for row in rows:
            known |= dict.fromkeys(row)
        first = () if kind in self._columns else tuple(each for each in _FIRST if each in rows[0])
        self._columns[kind] = list(dict.fromkeys((*first, *known)))
        path = self._directory / f"{kind}.csv"
        self._directory.mkdir(parents=True, exist_ok=True)
        write_text(path, _encoded([], self._columns[kind], head=True) + _encoded(rows, self._columns[kind]))
        self._files[kind] = AppendFile(path)

    def _read_table(self, kind: str) -> list[dict[str, Any]]:
        self._files[kind].flush()
        with (self._directory / f"{kind}.csv").open(encoding="utf-8", newline="") as file:
            return [{key: value for key, value in row.items() if value != ""} for row in csv.DictReader(file)]


def _row(event: Mapping[str, Any]) -> dict[str, Any]:
    """A record's fields by column, with what has no place in a table as JSON."""
    found = flat({key: value for key, value in event.items() if key != "event"})
    return {key: json.dumps(each) if isinstance(each, list | dict | bool) else each for key, each in found.items()}


def _encoded(rows: list[dict[str, Any]], columns: list[str], *, head: bool = False) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    if head:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
