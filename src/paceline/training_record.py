"""What the model of a run was trained on: for ``paceline record``, and for the cards of exported models."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import PacelineError, RunDirectoryError
from paceline.host.world import World
from paceline.parsing.plain_text import load_json
from paceline.parsing.units import first_of, format_count
from paceline.recipe.load import OWN_LOOP, load_recipe
from paceline.records.environment import in_folder_of
from paceline.records.ledger import LedgerStream, PositionEntry
from paceline.records.reader import read_environment, read_identity, read_plan_to_resume, read_recipe, read_summary
from paceline.records.run_directory import RunDirectory
from paceline.reports.audit import audit_run, ledger_geometry
from paceline.trainer.subject import Subject

Json = dict[str, Any]

_LICENCE_FILES = re.compile(r"(licen[cs]e|copying|terms)([-_.].*)?", re.IGNORECASE)
_LICENCE_LINE = re.compile(r"^license:\s*(.+?)\s*$", re.MULTILINE)
_MOST_LICENCES, _MOST_TEXT = 8, 2000
_MOST_CLASSES = 20
_ENVIRONMENT = ("platform", "python", "versions", "cpu", "device", "device_name", "git")


def training_record(run: RunDirectory) -> Json:
    """Return what a run was trained on: the run, ``data``, ``ledger``, ``environment``, ``recipe`` and ``unknown``.

    Raises:
        PacelineError: If its records are damaged.
    """
    tree, environment, unknown = read_recipe(run), read_environment(run), list[str]()
    ledger = _ledger(run, unknown)
    data = _data(run, tree, environment, unknown)
    return {
        **_facts(run, tree, unknown),
        "data": data,
        "ledger": ledger,
        "environment": {"started": _date(environment), **{key: environment.get(key) for key in _ENVIRONMENT}},
        "recipe": dict(tree),
        "unknown": unknown,
    }


def card_facts(run: RunDirectory) -> dict[str, str]:
    """Return what a run was trained on, for a card that is shared: without names of files and folders."""
    record = training_record(run)
    data, parent, origin = record["data"], record["parent"], record["initial_weights"]
    classes = [f"{name} {format_count(count)}" for name, count in data["classes"].items()]
    facts = {
        "Digest of the data": data["digest"],
        "Digest of the samples": data["content_digest"],
        "Training samples by class": first_of(classes, _MOST_CLASSES) if classes else None,
        "Digest of the ledger": record["ledger"]["sha256"],
        "Initial weights": " and ".join(Path(each).name for each in origin.split(" and ")),
        "Continues": parent and f"the run {parent['run_id']} from step {parent['step']}",
    }
    facts |= {f"Licence, in {name}": text for name, text in data["licences"].items()}
    facts["Not known"] = "; ".join(each.partition(":")[0] for each in record["unknown"])
    return {key: str(value) for key, value in facts.items() if value}


def beginning(tree: Json) -> str:
    """Return where a recipe's initial weights come from; empty for random ones."""
    model, teacher = tree.get("model") or {}, (tree.get("distillation") or {}).get("teacher")
    given = [model.get("initialize_from"), f"{model.get('name')}'s weights" if model.get("pretrained") else ""]
    given.append(f"the teacher {teacher}" if teacher else "")
    return " and ".join(str(each) for each in given if each not in (None, "", "off"))


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
        files = sorted(each for each in folder.iterdir() if _may_state(each) and each.is_file())
        for each in files[:_MOST_LICENCES]:
            with each.open(encoding="utf-8", errors="replace") as file:
                text = file.read(_MOST_TEXT)
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
