"""Trackers: destinations for records in addition to ``events.jsonl``, for people who watch runs elsewhere.

A tracker receives the same events as the file and is never read back: the file is authoritative. Each runs in a thread
(``async_tracker.py``), where its library is also imported.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from paceline.errors import RecipeError, did_you_mean
from paceline.parsing.plain_text import csv_cell, utf8
from paceline.records.events import AppendFile
from paceline.records.run_directory import RunDirectory
from paceline.telemetry.async_tracker import (
    AsyncTracker,
    Tracker,
    flatten,
    read_tracker_state,
    save_tracker_state,
    scalars,
)


@dataclass(frozen=True, kw_only=True)
class TrackerFacts:
    """Information about a run that trackers show in addition to its events.

    Attributes:
        name: The run's name.
        recipe: The recipe, nested.
        environment: As in ``environment.json``.
        start_step: The step the run resumes from.
    """

    name: str = ""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    start_step: int = 0


def _mlflow(directory: Path, facts: TrackerFacts) -> Tracker:
    from paceline.telemetry.mlflow_tracker import MlflowTracker

    return MlflowTracker(directory, facts.name, facts.recipe, facts.environment)


def _wandb(directory: Path, facts: TrackerFacts) -> Tracker:
    from paceline.telemetry.wandb_tracker import WandbTracker

    return WandbTracker(directory, facts.name, facts.recipe, facts.environment)


TRACKERS: Mapping[str, Callable[[Path, TrackerFacts], Tracker]] = {
    "tensorboard": lambda directory, facts: TensorBoardTracker(directory, start_step=facts.start_step),
    "mlflow": _mlflow,
    "wandb": _wandb,
    "csv": lambda directory, _: CsvTracker(directory),
}


def check_trackers(names: Iterable[str], *, are_asked_for: bool = True) -> None:
    """Check before a run starts that its trackers are available.

    Args:
        names: Their names.
        are_asked_for: Whether the user named them now. Without TensorBoard, the default, a run only lacks its files.

    Raises:
        RecipeError: If a name is unknown, or its library is not installed.
    """
    for name in names:
        if name not in TRACKERS:
            raise RecipeError(
                f"Found {name!r} in telemetry.trackers; available are: {', '.join(sorted(TRACKERS))}."
                + did_you_mean(name, TRACKERS)
            )
        if (are_asked_for or name != "tensorboard") and not _is_installed(name):
            extra = "vision" if name == "tensorboard" else name
            raise RecipeError(
                f"telemetry.trackers asks for {name!r}, which is not installed: run pip install 'paceline[{extra}]', "
                "or remove it from telemetry.trackers."
            )


def build_trackers(names: Iterable[str], directory: Path, facts: TrackerFacts) -> list[AsyncTracker]:
    """Build trackers that :func:`check_trackers` accepts; each gets a folder of its name in the run directory."""
    events = RunDirectory(directory).events
    return [
        AsyncTracker(name, partial(TRACKERS[name], directory / name, facts), history=events)
        for name in names
        if _is_installed(name)
    ]


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None  # a standard library module is named `csv`
    except ImportError:  # blocked, as in tests
        return False


# The first columns of every table, if a record has them.
_FIRST_COLUMNS = ("step", "position", "time", "epoch", "samples", "split", "weights")


class CsvTracker:
    """Writes each record as a row of its kind's file: ``step.csv``, ``evaluation.csv``, ….

    Each launch rewrites its tables: it gets the run's earlier records first, so no row is missing or repeated. Columns
    keep their names and positions: a value that first appears in a record becomes a new last column, empty in earlier
    rows. Nested objects become columns with dotted names, and None is an empty field.

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
        """Append records to their tables, which are readable while they grow."""
        for event in events:
            kind, row = str(event["event"]), _row(event)
            if kind not in self._files or not row.keys() <= set(self._columns[kind]):
                self._widen(kind, row)
            text = io.StringIO()
            csv.DictWriter(text, self._columns[kind], restval="", lineterminator="\n").writerow(row)
            self._files[kind].write(utf8(text.getvalue()).encode())
        for file in self._files.values():
            file.flush()

    def close(self, status: str = "") -> None:
        """Close the files."""
        while self._files:
            self._files.popitem()[1].close()

    def _widen(self, kind: str, row: Mapping[str, Any]) -> None:
        """Add a row's columns to a table: create it, or replace it atomically by a wider one."""
        csv.field_size_limit(sys.maxsize)  # of the cells that are read back
        first = [each for each in _FIRST_COLUMNS if each in row]
        self._columns[kind] = list(dict.fromkeys((*self._columns.get(kind, first), *row)))
        path, wider = self._directory / f"{kind}.csv", self._directory / f"{kind}.csv.partial"
        self._directory.mkdir(exist_ok=True)
        with wider.open("w", encoding="utf-8", newline="") as target:
            writer = csv.DictWriter(target, self._columns[kind], restval="", lineterminator="\n")
            writer.writeheader()
            if kind in self._files:
                self._files.pop(kind).close()
                with path.open(encoding="utf-8", newline="") as source:
                    writer.writerows(csv.DictReader(source))
        wider.replace(path)
        self._files[kind] = AppendFile(path)


def _row(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record's fields by column, with values that do not fit in a cell as JSON."""
    flattened = flatten({key: value for key, value in event.items() if key != "event"})
    return {
        key: json.dumps(each) if isinstance(each, list | dict | bool) else csv_cell(each)
        for key, each in flattened.items()
    }


class TensorBoardTracker:
    """Writes step records as ``train/<name>`` and evaluations as ``evaluation/<weights>/<name>``.

    A resumed run marks its last logged step, and everything that an earlier launch wrote after it, as purged, and
    continues from there: TensorBoard skips purged records.

    Args:
        directory: The log folder for TensorBoard.
        start_step: The step the run resumes from.
    """

    def __init__(self, directory: Path, *, start_step: int = 0) -> None:
        self._directory = directory
        # Versions without this state file wrote each record immediately.
        has_earlier_files = any(directory.glob("events.out.tfevents.*"))
        self._first = min(
            int(read_tracker_state(directory).get("last", start_step if has_earlier_files else 0)), start_step
        )
        self._writer: Any = None

    def write(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Write the values of events, from the first step that may be missing."""
        if self._writer is not None:
            os.stat(self._directory)  # otherwise the writer's own thread would print a traceback
        for event in events:
            values = scalars(event)
            if not values or event["step"] < self._first:
                continue
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                self._directory.mkdir(exist_ok=True)
                self._writer = SummaryWriter(str(self._directory), purge_step=self._first)
            for tag, value in values.items():
                self._writer.add_scalar(tag, value, event["step"], event.get("time"))
        if self._writer is not None:
            # Records are rare, and a record still buffered when the process is killed would be a gap.
            self._writer.flush()
            save_tracker_state(self._directory, {"last": events[-1]["step"]})

    def close(self, status: str) -> None:
        """Close the file, if one was opened."""
        if self._writer is not None and self._directory.is_dir():
            self._writer.close()
            self._writer = None
