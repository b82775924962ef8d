"""Why two runs differ: what their records say of recipe, data, code and environment."""

from __future__ import annotations

import filecmp
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from paceline.recipe.load import differences
from paceline.recipe.schema import Recipe
from paceline.records.environment import folder_of
from paceline.records.reader import read_events, read_recipe
from paceline.records.run_directory import RunDirectory
from paceline_advisor import Json, frozen, named
from paceline_advisor.replay.trace import Where

# Keys that change no weight; ``data.path`` is only where the data are, and the digests tell what they are.
_WITHOUT_EFFECT = (
    *("telemetry.", "checkpoint.", "evaluate.", "train.until", "base"),
    *("parallel.affinity", "parallel.timeout", "parallel.backend"),
    *("data.workers", "data.prefetch", "data.path", "data.max_broken"),
)
# In which part of a step a key acts first; the others may act anywhere.
_PHASES = {
    "data.": ("data",),
    "model.": ("forward",),
    "train.loss": ("forward",),
    "train.label_smoothing": ("forward",),
    "train.class_weights": ("forward",),
    "distillation.": ("forward",),
    "optimizer.": ("update", "records"),
    "schedule.": ("update", "records"),
    "train.ema": ("update",),
    "train.duration": ("update", "records"),
}
_PLANNED = {
    "world_size": "processes",
    "precision": "train.precision",
    "float32_matmul": "train.float32_matmul",
    "channels_last": "model.channels_last",
    "compile": "model.compile",
    "device": "parallel.device",
    "device_name": "device",
    "strategy": "parallel.strategy",
    "threads_per_process": "parallel.threads",
    "logical_ranks": "micro-batches per step",
}
_MOST_FILES = 50
# A commit may change anything, and commands differ in the run directory.
_UNSURE = ("git revision", "command")
# Packages on which no bit of a run depends.
_NO_BITS = ("tensorboard", "scikit-learn", "pydantic", "torch")


@frozen
class Side:
    """One of two runs, with what it recorded of itself."""

    run: RunDirectory
    recipe: Recipe
    plan: Json
    environment: Json


@frozen
class Cause:
    """A possible cause.

    Attributes:
        kind: ``recipe``, ``data``, ``code``, ``environment``, ``order``, ``random``, ``nondeterminism``, ``weights`` or
            ``records``.
        key: Which key, file, module or version.
        evidence: What was found, in a sentence.
        rank: Its place among the causes: the lower, the more it explains.
    """

    kind: str
    key: str
    evidence: str
    rank: int = 0

    def to_json(self) -> Json:
        """Return it as one JSON object."""
        return {"kind": self.kind, "key": self.key, "evidence": self.evidence}


def recorded_causes(first: Side, second: Side, where: Where | None, position: int) -> Iterator[Cause]:
    """Yield what the records of two runs differ in, and may explain a difference at a position."""
    changed = differences(first.recipe, second.recipe)
    yield from _of_recipe(first, second, changed, where)
    yield from _of_data(first, second)
    for what, old, new in _other_code(first, second):
        rank = 2 if what in _UNSURE else 0
        yield Cause(kind="code", key=what, evidence=f"{what} was {old} and {new}", rank=rank)
    for name, old, new in other_environment(first.environment, second.environment):
        yield Cause(kind="environment", key=name, evidence=f"{name} was {old} and {new}")
    for fact, key in _PLANNED.items():
        old, new = (each.plan.get(fact) for each in (first, second))
        if fact == "world_size":
            old, new = (_processes(each.run, position) or each.plan.get(fact) for each in (first, second))
        if key not in changed and old != new and None not in (old, new):
            yield Cause(kind="environment", key=key, evidence=f"{key} was {old} and {new}")


def _of_recipe(first: Side, second: Side, changed: Mapping[str, Any], where: Where | None) -> Iterator[Cause]:
    phase = None if where is None else where.phase
    ignored = tuple(each for each in _WITHOUT_EFFECT if not (phase == "evaluation" and each == "evaluate."))
    unused = first.plan.get("unused", {}).keys() & second.plan.get("unused", {}).keys()
    for key, (old, new) in changed.items():
        if not key.startswith(ignored) and key not in unused:
            phases = next((each for name, each in _PHASES.items() if key.startswith(name)), (phase,))
            evidence = f"{key} was {old} and {new}"
            yield Cause(kind="recipe", key=key, evidence=evidence, rank=0 if phase is None or phase in phases else 1)


def _processes(run: RunDirectory, position: int) -> int | None:
    """Return the number of processes of the launch that took the step to a position."""
    starts = (each for each in read_events(run.events, kinds=("start",)) if each.get("position", 0) < position)
    found = [each.get("world_size") for each in starts] if run.events.is_file() else []
    return found[-1] if found else None


def _of_data(first: Side, second: Side) -> Iterator[Cause]:
    one, another = (each.plan.get("data", {}) for each in (first, second))
    known = [key for key in ("digest", "content_digest") if key in one and key in another]
    if all(one[key] == another[key] for key in known):
        return
    counts = [each.plan.get("train_samples") for each in (first, second)]
    evidence = "the recorded digests of the data differ"
    if counts[0] != counts[1]:
        evidence += f"; {counts[0]} and {counts[1]} training samples"
    root, other_root = (data_folder(each.run, each.environment) for each in (first, second))
    files: tuple[str, ...] = ()
    if root == other_root:
        files = changed_files(first.run, first.environment)
        evidence += f"; files written after the first run started: {named(files)}" if files else ""
    elif root is not None and other_root is not None and root.is_dir() and other_root.is_dir():
        files = tuple(islice(_other_files(root, other_root), _MOST_FILES))
        evidence += f"; {named(files)}" if files else ""
    yield Cause(kind="data", key=files[0].partition(": ")[0] if files else "data.path", evidence=evidence)


def data_folder(run: RunDirectory, environment: Mapping[str, Any]) -> Path | None:
    """Return the folder of a run's data; None if its recipe names no path."""
    path = (read_recipe(run).get("data") or {}).get("path")
    if not path:
        return None
    root = (folder_of(environment) or Path()) / Path(str(path)).expanduser()
    return root.parent if root.is_file() else root  # a table names pictures next to it


def changed_files(run: RunDirectory, environment: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the files of the data that were written after the run had started."""
    began, folder = environment.get("time"), data_folder(run, environment)
    if not isinstance(began, int | float) or folder is None:
        return ()
    files = sorted(each for each in folder.rglob("*") if each.is_file() and run.root not in each.parents)
    found = [each for each in files if max(each.stat().st_mtime, each.stat().st_ctime) > began]
    return tuple(str(each.relative_to(folder)) for each in found)


def _other_files(first: Path, second: Path) -> Iterator[str]:
    one, another = ({str(p.relative_to(each)) for p in each.rglob("*") if p.is_file()} for each in (first, second))
    listed = [
        f"{name}: missing in the data of the {'second' if name in one else 'first'} run"
        for name in sorted(one ^ another)
    ]
    sizes = {name: [(each / name).stat().st_size for each in (first, second)] for name in sorted(one & another)}
    listed += [f"{name}: {size} and {other} bytes" for name, (size, other) in sizes.items() if size != other]
    yield from listed
    if not listed:  # contents are read only where nothing else tells
        other = (name for name in sizes if not filecmp.cmp(first / name, second / name, shallow=False))
        yield from (f"{name}: other content" for name in other)


def _other_code(first: Side, second: Side) -> Iterator[tuple[str, Any, Any]]:
    """Yield what differs in the digests of your code, of the objects you gave, and of the repository."""
    code = [each.environment.get("code") or {} for each in (first, second)]
    objects = [each.plan.get("data", {}).get("objects") or {} for each in (first, second)]
    for one, another in (code, objects):
        for name in sorted(one.keys() & another.keys()):
            if one[name] != another[name]:
                yield f"source of {name}", one[name], another[name]
    programs = [each.environment.get("program") for each in (first, second)]
    if None not in programs:
        one, another = (Path(str(each)).name for each in programs)
        if one != another and code[0].get(one) != code[1].get(another):
            yield "program", one, another
        one, another = (each.environment.get("command") for each in (first, second))
        if one != another:
            yield "command", one, another
    revision, other = ((each.environment.get("git") or {}).get("revision") for each in (first, second))
    if None not in (revision, other) and revision != other:
        yield "git revision", revision, other


def other_environment(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield what may change bits and differs between two environments, with both values."""
    model, other = (dict(each.get("cpu") or {}).get("model") for each in (first, second))
    names = {"vector instructions": "cpu_capability", "torch": "torch", "cuda": "cuda"}
    old, new = (dict(each.get("versions") or {}) for each in (first, second))
    packages = ((name, old[name], new[name]) for name in old if name in new and name not in _NO_BITS)
    facts = ((name, first.get(key), second.get(key)) for name, key in names.items())
    for name, one, another in (("processor", model, other), *facts, *packages):
        if one != another and None not in (one, another):
            yield name, one, another
