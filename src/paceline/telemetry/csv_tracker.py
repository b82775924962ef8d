"""CSV tables: one file for each kind of record, for spreadsheets and data frames.

Columns keep their names and places: a number that a record brings for the first time is a new last column, empty in the
rows before. Objects within records are columns by dotted names, and None is an empty field.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.escaping import csv_cell
from paceline.records.append_file import AppendFile
from paceline.telemetry.scalars import flat

# First in every table, where a record has them.
_FIRST = ("step", "position", "time", "epoch", "samples", "split", "weights")


class CsvTracker:
    """Writes each record as a row of its kind's file: ``step.csv``, ``evaluation.csv``, ….

    Each launch begins its tables anew: it is given the run's earlier records first, so no row is missing and none is
    there twice.

    Args:
        directory: The folder of the tables.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._columns: dict[str, list[str]] = {}
        self._files: dict[str, AppendFile] = {}
        for stale in directory.glob("*.csv*"):
            stale.unlink()

    def write(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Add records to their tables, which are readable while they grow."""
        for event in events:
            kind, row = str(event["event"]), _row(event)
            if kind not in self._files or not row.keys() <= set(self._columns[kind]):
                self._widen(kind, row)
            text = io.StringIO()
            csv.DictWriter(text, self._columns[kind], restval="", lineterminator="\n").writerow(row)
            self._files[kind].write(text.getvalue().encode())
        for file in self._files.values():
            file.flush()

    def close(self, status: str = "") -> None:
        """Close the files."""
        while self._files:
            self._files.popitem()[1].close()

    def _widen(self, kind: str, row: Mapping[str, Any]) -> None:
        """Give a table a row's columns: begin it, or replace it by a wider one in one move."""
        first = [each for each in _FIRST if each in row]
        self._columns[kind] = list(dict.fromkeys((*self._columns.get(kind, first), *row)))
        path, wider = self._directory / f"{kind}.csv", self._directory / f"{kind}.csv.partial"
        self._directory.mkdir(exist_ok=True)
        with wider.open("w", encoding="utf-8", newline="") as after:
            writer = csv.DictWriter(after, self._columns[kind], restval="", lineterminator="\n")
            writer.writeheader()
            if kind in self._files:
                self._files.pop(kind).close()
                with path.open(encoding="utf-8", newline="") as before:
                    writer.writerows(csv.DictReader(before))
        wider.replace(path)
        self._files[kind] = AppendFile(path)


def _row(event: Mapping[str, Any]) -> dict[str, Any]:
    """A record's fields by column, with what has no place in a table as JSON."""
    found = flat({key: value for key, value in event.items() if key != "event"})
    return {
        key: json.dumps(each) if isinstance(each, list | dict | bool) else csv_cell(each) for key, each in found.items()
    }
