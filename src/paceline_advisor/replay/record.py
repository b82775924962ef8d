"""`paceline record`: what the model of a run was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.command import Log
from paceline.pages.page import Table, write_page
from paceline.pages.shown import Shown, page_of
from paceline.parsing.units import format_count
from paceline.records.run_directory import existing_run
from paceline.reports.html.runs import flattened
from paceline.training_record import training_record
from paceline_advisor import Json, frozen
from paceline_advisor.commands import Record

_MOST_CLASSES = 20
# Shown in tables of their own; the other facts are the run's.
_PARTS = ("data", "ledger", "environment", "recipe", "unknown")


@frozen
class TrainingRecord:
    """What a model was trained on.

    Attributes:
        run: The run directory.
        record: What is known; see :mod:`paceline.training_record`.
        page: The page written, if any.
    """

    run: Path
    record: Json
    page: Path | None = None

    def to_json(self) -> Json:
        """Return the record as one JSON object."""
        return {"run": str(self.run), **self.record}

    def __paceline__(self) -> Shown:
        """Show the facts, the classes and the licences; the recipe only on the page."""
        data, ledger, environment, recipe, unknown = (self.record[key] for key in _PARTS)
        facts = {key: value for key, value in self.record.items() if key not in _PARTS}
        listed = {key: value for key, value in data.items() if key not in ("classes", "licences")}
        blocks: list[Any] = [_table("Run", facts), _table("Data", listed)]
        if classes := data["classes"]:
            rows = [(name, format_count(count)) for name, count in list(classes.items())[:_MOST_CLASSES]]
            more = len(classes) - len(rows)
            rows += [(f"{more:,} more", "")] * (more > 0)
            blocks.append(Table(columns=("class", "training samples"), rows=rows))
        blocks += [f"{name} says: {text}" for name, text in data["licences"].items()]
        blocks += [_table("Ledger", ledger), _table("Software and machine", environment)]
        blocks += [f"not known: {each}" for each in unknown]
        if self.page is not None:
            blocks.append(f"written: {self.page}")
        rows = [(key, str(value)) for key, value in flattened(recipe).items()]
        whole = Table(columns=("key", "value"), rows=rows, caption="Recipe", folded=True)
        return Shown(title=f"What {self.run} was trained on", blocks=[*blocks, whole])


def _table(title: str, facts: Mapping[str, Any]) -> Table:
    empty: tuple[Any, ...] = (None, "", {}, [], ())
    rows = [(key.replace("_", " "), _written(value)) for key, value in facts.items() if value not in empty]
    return Table(columns=(title, ""), rows=rows)


def _written(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_written(each)}" for key, each in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(_written, value))
    return format_count(value) if type(value) is int else str(value)


def record(options: Record, log: Log) -> TrainingRecord:
    """Collect what a run was trained on, and write the page if one is wanted.

    Raises:
        PacelineError: If there is no such run, its records are damaged, or the page cannot be written.
    """
    log("reading the ledger and opening the data")
    run = existing_run(options.run.absolute())
    found = TrainingRecord(run=options.run, record=training_record(run))
    if options.output is not None:
        write_page(options.output, page_of(found.__paceline__()))
    return replace(found, page=options.output)
