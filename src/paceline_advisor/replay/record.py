"""`paceline record`: what the model of a run was trained on."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from paceline.command import Log
from paceline.errors import PacelineError, RunDirectoryError
from paceline.host.world import World
from paceline.pages.page import Table, write_page
from paceline.pages.shown import Shown, page_of
from paceline.parsing.plain_text import load_json
from paceline.parsing.units import format_count
from paceline.recipe.load import OWN_LOOP, load_recipe
from paceline.records.ledger import LedgerStream, PositionEntry
from paceline.records.reader import read_environment, read_identity, read_plan_to_resume, read_recipe, read_summary
from paceline.records.run_directory import RunDirectory, existing_run
from paceline.reports.audit import audit_run, ledger_geometry
from paceline.reports.html.runs import flattened
from paceline.trainer.subject import Subject
from paceline_advisor import Json, frozen
from paceline_advisor.commands import Record
from paceline_advisor.replay.points import in_folder_of
from paceline_advisor.replay.seen import beginning

_LICENCE_FILES = re.compile(r"(licen[cs]e|copying|terms)([-_.].*)?", re.IGNORECASE)
_LICENCE_LINE = re.compile(r"^license:\s*(.+?)\s*$", re.MULTILINE)
_MOST_LICENCES, _MOST_TEXT = 8, 2000
_MOST_CLASSES = 20
_ENVIRONMENT = ("platform", "python", "versions", "cpu", "device", "device_name", "git")


@frozen
class TrainingRecord:
    """What a model was trained on.

    Attributes:
        run: The run directory.
        facts: The run: its identity, status, steps, weights and parents.
        data: The training data: where they are, digests, numbers of samples, classes, sets, licences.
        ledger: What the ledger proves, and its digest.
        environment: The software and the machine.
        recipe: The recipe, as resolved.
        unknown: What could not be told, and why.
        page: The page written, if any.
    """

    run: Path
    facts: Json
    data: Json
    ledger: Json
    environment: Json
    recipe: Json
    unknown: tuple[str, ...]
    page: Path | None = None

    def to_json(self) -> Json:
        """Return the record as one JSON object."""
        return {
            "run": str(self.run),
            **self.facts,
            "data": self.data,
            "ledger": self.ledger,
            "environment": self.environment,
            "recipe": self.recipe,
            "unknown": list(self.unknown),
        }

    def __paceline__(self) -> Shown:
        """Show the facts, the classes and the licences; the recipe only on the page."""
        classes = self.data["classes"]
        data = {key: value for key, value in self.data.items() if key not in ("classes", "licences")}
        blocks: list[Any] = [_table("Run", self.facts), _table("Data", data)]
        if classes:
            rows = [(name, format_count(count)) for name, count in list(classes.items())[:_MOST_CLASSES]]
            more = len(classes) - len(rows)
            rows += [(f"{more:,} more", "")] * (more > 0)
            blocks.append(Table(columns=("class", "training samples"), rows=rows))
        blocks += [f"{name} says: {text}" for name, text in self.data["licences"].items()]
        blocks += [_table("Ledger", self.ledger), _table("Software and machine", self.environment)]
        blocks += [f"not known: {each}" for each in self.unknown]
        if self.page is not None:
            blocks.append(f"written: {self.page}")
        rows = [(key, str(value)) for key, value in flattened(self.recipe).items()]
        recipe = Table(columns=("key", "value"), rows=rows, caption="Recipe", folded=True)
        return Shown(title=f"What {self.run} was trained on", blocks=[*blocks, recipe])


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
    run = existing_run(options.run.absolute())
    log("reading the ledger")
    tree, environment, unknown = read_recipe(run), read_environment(run), list[str]()
    ledger = _ledger(run, unknown)
    log("opening the data")
    data = _data(run, tree, environment, unknown)
    found = TrainingRecord(
        run=options.run,
        facts=_facts(run, tree, unknown),
        data=data,
        ledger=ledger,
        environment={"started": _date(environment), **{key: environment.get(key) for key in _ENVIRONMENT}},
        recipe=dict(tree),
        unknown=tuple(unknown),
    )
    if options.output is not None:
        write_page(options.output, page_of(found.__paceline__()))
    return replace(found, page=options.output)


def _date(environment: Json) -> str | None:
    moment = environment.get("time")
    return None if moment is None else datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds")


def _facts(run: RunDirectory, tree: Json, unknown: list[str]) -> Json:
    identity = read_identity(run)
    facts: Json = {"run_id": None if identity is None else identity.id, "initial_weights": beginning(tree) or "random"}
    facts["parent"] = None if identity is None else identity.parent
    try:
        summary = read_summary(run)
    except RunDirectoryError:
        unknown.append("status and digest of the weights: the run has not ended, or was killed")
        return facts
    names = ("status", "step", "epoch", "samples", "resumes", "world_size", "weights_sha256", "ema_sha256")
    return {**facts, **{name: getattr(summary, name) for name in names}}


# ------------------------------------------------------------------------------------------------ data


def _data(run: RunDirectory, tree: Json, environment: Json, unknown: list[str]) -> Json:
    """Return the facts of the training data; what needs the data themselves is left out where they are not here."""
    plan, asked = read_plan_to_resume(run), dict(tree.get("data") or {})
    described = plan["data"]
    facts: Json = {key: described.get(key) for key in ("dataset", "task", "digest", "content_digest")}
    facts["path"] = None if asked.get("path") == "off" else asked.get("path")
    facts |= {"train_samples": plan["train_samples"], "held_out_samples": plan["evaluation_samples"]}
    facts |= {"sets": asked.get("mixture"), "classes": {}, "licences": {}}
    with in_folder_of(environment):
        facts["licences"] = dict(_licences(asked.get("path")))
        if tree.get("task") == OWN_LOOP:
            unknown.append("classes: a program with paceline.Loop read the data")
            return facts
        try:
            with Subject.open(load_recipe(run.root).recipe, World(), "task") as subject:
                if subject.data.description.get("digest") != described.get("digest"):
                    unknown.append("classes: the data have changed since the run was trained")
                    return facts
                labels, names = subject.task.sample_classes(), subject.task.description().get("class_names")
        except PacelineError as error:
            unknown.append(f"classes: the data cannot be opened here ({error})")
            return facts
    if labels is not None and names:
        counts = np.bincount(labels, minlength=len(names))
        facts["classes"] = {str(name): int(count) for name, count in zip(names, counts, strict=True)}
    return facts


def _licences(path: Any) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of licence files in the data's folder, and the licences that data cards state."""
    if not isinstance(path, str) or "://" in path:
        return
    place = Path(path).expanduser()
    folder = place if place.is_dir() else place.parent
    with contextlib.suppress(OSError):
        files = sorted(each for each in folder.iterdir() if each.is_file())
        for each in files:
            text = each.read_text(encoding="utf-8", errors="replace")[:_MOST_TEXT] if _may_state(each) else ""
            if _LICENCE_FILES.fullmatch(each.name):
                yield each.name, " ".join(text.split())
            elif each.name == "README.md" and text.startswith("---") and (found := _LICENCE_LINE.search(text)):
                yield each.name, found[1]
            elif each.name == "dataset_info.json":
                with contextlib.suppress(ValueError):
                    yield from ((each.name, str(said)) for said in [load_json(text).get("license")] if said)


def _may_state(path: Path) -> bool:
    return bool(_LICENCE_FILES.fullmatch(path.name)) or path.name in ("README.md", "dataset_info.json")


# ------------------------------------------------------------------------------------------------ ledger


def _ledger(run: RunDirectory, unknown: list[str]) -> Json:
    """Return what the ledger proves, and a digest of which samples each step used, whatever the number of ranks."""
    digest = {"sha256": ledger_digest(run)}
    try:
        audit = audit_run(run.root)
    except RunDirectoryError as error:
        unknown.append(f"whether the ledger is whole: {error}")
        return digest
    epochs = [each.name for each in audit.epochs]
    return {"passed": audit.passed, "steps": audit.steps, "epochs": epochs, "objections": audit.objections, **digest}


def ledger_digest(run: RunDirectory) -> str:
    """Return the SHA-256 of each step's number and its samples, sorted, as 64-bit little-endian integers."""
    geometry, digest, stream = ledger_geometry(run), hashlib.sha256(), LedgerStream(run.ledger)
    while stream.head is not None:
        step, parts = stream.head.step, list[Any]()
        for entry in stream.take(step=step):
            if isinstance(entry, PositionEntry):
                parts.append(geometry.ids_at(entry.epoch, entry.first, entry.first + entry.samples))
            else:
                parts += (entry.ids, entry.broken)
        digest.update(np.concatenate([[step], np.sort(np.concatenate(parts))]).astype("<i8").tobytes())
    return digest.hexdigest()
