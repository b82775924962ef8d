"""Readers of the files of a run directory, for reports, audits and scripts; no torch needed."""

from __future__ import annotations

import contextlib
import itertools
import math
import platform
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from paceline.errors import RunDirectoryError, VersionError
from paceline.parsing.plain_text import load_json
from paceline.parsing.plain_yaml import BoundedLoader
from paceline.records.events import INPUTS, Status, for_display, parse_line, wrong_field
from paceline.records.run_directory import (
    Identity,
    RunDirectory,
    existing_run,
    file_error,
    file_operation,
    refuse_special_file,
)

# Substrings in the names of values that depend on a clock.
_TIMING_WORDS = ("time", "seconds", "throughput", "data_wait_fraction", "mfu", "slowest")


def strip_timings(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of an event that must be equal in an interrupted and an uninterrupted run."""
    return {key: value for key, value in event.items() if not any(word in key for word in _TIMING_WORDS)}


def read_events(path: Path, *, kinds: Collection[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the events of a file in order, optionally only of some kinds; a torn last line is left out.

    Raises:
        RunDirectoryError: If the file cannot be read or a line is not an event.
    """
    refuse_special_file(path)
    with file_operation("read", path), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            # Only the last line of a file can lack its line ending.
            event = parse_line(line, path, number, is_last=not line.endswith(b"\n"))
            if event is not None and (kinds is None or event["event"] in kinds):
                yield event


# About 140 MB of memory; a chart shows far fewer.
MAX_STEP_RECORDS = 50_000


def read_for_report(
    path: Path, *, kinds: Collection[str] | None = None
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Return the events of a file, and notes: of very many step records only every 2nd, 4th, … is kept.

    So the memory for a run's report does not grow with its steps. The last step record is always kept.

    Raises:
        RunDirectoryError: As :func:`read_events`.
    """
    kept: list[dict[str, Any]] = []
    last: dict[str, Any] = {}
    number, held, later, every = 0, 0, 0, 1  # later: events after the last step record
    for event in read_events(path, kinds=kinds):
        later += 1
        if event["event"] == "step":
            number, later, last = number + 1, 0, event
            if number % every:
                continue
            held += 1
        kept.append(event)
        if held > MAX_STEP_RECORDS:
            records = itertools.count(1)
            kept = [each for each in kept if each["event"] != "step" or next(records) % 2 == 0]
            every, held = 2 * every, held // 2
    if number % every:
        kept.insert(len(kept) - later, last)
    kept = [for_display(each, path) for each in kept]
    return kept, (f"Of {number:,} step records, one in {every} is used.",) if every > 1 else ()


def recorded_step(run: RunDirectory) -> tuple[int | None, bool]:
    """Return the step that the outcome names or, while there is none, the last checkpoint's event.

    Returns:
        The step, None if no intact record names one; and whether a launch ended there after its last save.
    """
    identity = read_identity(run)
    with contextlib.suppress(RunDirectoryError):
        summary = read_summary(run)
        if summary.is_of(identity.id if identity else None):
            return summary.step, summary.status in ENDED
    with contextlib.suppress(RunDirectoryError):
        return max((event["step"] for event in read_events(run.events, kinds={"checkpoint"})), default=None), False
    return None, False


ENDED = ("completed", "stopped")
"""Statuses of a launch that ended after its last save."""


def wrong_records(
    run: RunDirectory, run_id: str | None, *, until: float = math.inf, resumed: str = "", steps: int = 0
) -> Iterator[str]:
    """Find what an event log has lost, or holds twice or out of order, and records of other runs.

    Yields a clause for each problem.

    Args:
        run: The run directory.
        run_id: The run's identity; None if it is not known.
        until: The position up to which it is read.
        resumed: Name of the checkpoint from which the run is about to resume.
        steps: The step that it must reach.

    Raises:
        RunDirectoryError: As :func:`read_events`.
    """
    path = run.events
    yield from _foreign_outcome(run, run_id)
    if not path.exists():
        yield f"there is no {path.name}"
        return
    saved, logged, runs, gap = set(), [0], {run_id}, ""
    every = 1  # interval of a launch's step records, 0 if they vary; before any launch there are none
    begin = last = 0  # the launch's first position; step of the last event
    resume = [{"event": "resume", "checkpoint": resumed, "step": 0}] if resumed else []
    # An observation precedes its step's record.
    events = (each for each in itertools.chain(read_events(path), resume) if each["event"] != "observation")
    for event in (each for each in events if each.get("position", each["step"]) <= until):
        kind, position = event["event"], event.get("position", event["step"])
        if kind == "checkpoint":
            saved.add(event.get("checkpoint"))
        # A checkpoint's event reaches the disk before the checkpoint does.
        elif kind == "resume" and (name := str(event.get("checkpoint"))).removesuffix(".replaced") not in saved:
            yield f"{path.name} lacks records before the resume from {name}: it ended at step {last}"
        if kind == "start":
            interval, begin = event.get("log_every"), position
            every = interval if type(interval) is int else 0
            runs.add(event.get("run", run_id))
        # A step's record precedes its evaluation and its checkpoint.
        recorded = position if kind in ("evaluation", "checkpoint") else position - 1
        if every and recorded // every * every > max(begin, logged[-1]):
            gap = gap or f"{path.name} lacks step records after step {logged[-1]}"
        if kind == "step":
            logged.append(position)
        last = event["step"]
    for is_found, clause in (
        (run_id is not None and len(runs) > 1, f"{path.name} is of another run"),
        (bool(gap), gap),
        (logged != sorted({*logged}), f"{path.name} holds step records twice or out of order"),
        (last < steps, f"{path.name} ends at step {last}, and the run at step {steps}"),
    ):
        if is_found:
            yield clause


def _foreign_outcome(run: RunDirectory, run_id: str | None) -> Iterator[str]:
    with contextlib.suppress(RunDirectoryError):
        if not read_summary(run).is_of(run_id):
            yield f"{run.summary.name} is of another run"


def read_summary(run: RunDirectory) -> Summary:
    """Read ``summary.json``.

    Raises:
        RunDirectoryError: If it is missing or damaged.
    """
    return Summary.from_json(read_json(run.summary))


# Keys of an evaluation that are not metrics.
NO_METRICS = INPUTS | {
    *("event", "step", "position", "time", "epoch", "split", "weights", "samples", "seconds", "train_seconds")
}


def read_plan(run: RunDirectory) -> dict[str, Any]:
    """Read ``plan.json``.

    Raises:
        RunDirectoryError: If it is missing or damaged.
    """
    return read_json(run.plan)


def beyond_until(run: RunDirectory) -> tuple[str, ...]:
    """Return the override to resume a run with that has reached its own ``train.until``; otherwise nothing."""
    with contextlib.suppress(RunDirectoryError):
        until = read_plan(run).get("until_step")
        steps = (name for each in run.checkpoints.glob("step-*") if (name := each.name[5:]).isdecimal())
        if isinstance(until, int) and max(map(int, steps), default=-1) >= until:
            return ("train.until=null",)
    return ()


# Values that a run's continuation, and its audit, are compared with.
_NEEDED = {
    "strategy": str,
    "data": dict,
    **dict.fromkeys(("batch_phases", "sampling", "mixture"), list),
    "total_steps": int,
    "train_samples": int,
    "global_batch_size": int,
}


def read_plan_to_resume(run: RunDirectory) -> dict[str, Any]:
    """Read ``plan.json`` and require its main numbers.

    Raises:
        RunDirectoryError: If it is missing, damaged, or lacks one of them.
    """
    plan = read_plan(run)
    for key, kind in _NEEDED.items():
        if not isinstance(plan.get(key), kind):
            raise RunDirectoryError(
                f"'{run.plan}' is damaged: found {key}={str(plan.get(key))[:80]}. Restore it from a "
                "copy, or start the run in another directory."
            )
    return plan


def changed_objects(run: RunDirectory, data: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, str]:
    """Return a sentence for each object of yours, by its argument, that is not what the run was started with.

    Another version of Python compiles the same functions otherwise, so that nothing can be told.

    Args:
        run: The run directory.
        data: The plan's facts of the data now, with digests of the objects.
        names: The names of the objects now.
    """
    with contextlib.suppress(RunDirectoryError):
        if str(read_environment(run).get("python")).split(".")[:2] != platform.python_version().split(".")[:2]:
            return {}
    was, now = (each.get("objects", {}) for each in (read_plan_to_resume(run)["data"], data))
    old, changed = read_recipe(run).get("objects") or {}, {}
    for name, digest in was.items():
        full = str(now.get(name))
        if digest in (full, full.partition("-")[0]):  # earlier versions had only the first part
            continue
        changed[name] = f"{name} has changed since the run started"
        if old.get(name) != names.get(name):
            changed[name] = f"{name} was {old.get(name)} and is now {names.get(name)}"
    return changed


def check_objects(run: RunDirectory, data: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Check that a completed run is that of these objects; arguments as for :func:`changed_objects`.

    Raises:
        RunDirectoryError: Naming what differs.
    """
    if changed := changed_objects(run, data, names):
        raise RunDirectoryError(
            f"the run in '{run.root}' is complete, and {'; '.join(changed.values())}: its metrics and weights are "
            "those of the former; give the same again, or choose another run directory.",
            key=next(iter(changed)),
            path=run.root,
        )


def read_environment(run: RunDirectory) -> dict[str, Any]:
    """Read ``environment.json``, or return an empty mapping if there is none: no result depends on it.

    Raises:
        RunDirectoryError: If it is damaged.
    """
    return read_json(run.environment) if run.environment.is_file() else {}


def read_recipe(run: RunDirectory) -> dict[str, Any]:
    """Read ``recipe.yaml`` as plain values; ``paceline.recipe`` turns them into a recipe.

    Raises:
        RunDirectoryError: If there is not a run, or the file is damaged.
    """
    existing_run(run.root)
    try:
        document = yaml.load(_read_text(run.recipe), Loader=BoundedLoader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date or number
        raise RunDirectoryError(f"'{run.recipe}' is damaged: {' '.join(str(error).split())}") from error
    return _mapping(document, run.recipe)


def read_json(path: Path) -> dict[str, Any]:
    """Read one of the run directory's JSON files.

    Raises:
        RunDirectoryError: If it is missing, damaged, or does not contain an object.
        VersionError: If it has a format version; no file of this version has one.
    """
    try:
        document = load_json(_read_text(path))
    except ValueError as error:
        raise RunDirectoryError(f"'{path}' is damaged: {error}.") from error
    if "format_version" in (document := _mapping(document, path)):
        raise VersionError.of(path, document["format_version"])
    return document


def _read_text(path: Path) -> str:
    """Read a file, wording its absence for the user."""
    refuse_special_file(path)
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise RunDirectoryError(
            f"'{path.parent}' holds no {path.name}: name the directory of a started run, or restore the file from a "
            "copy."
        ) from error
    except OSError as error:
        raise file_error("read", path, error) from error
    except UnicodeDecodeError as error:
        raise RunDirectoryError(f"'{path}' is damaged: {error}.") from error


def _mapping(document: Any, path: Path) -> dict[str, Any]:
    """Return the document if it is an object."""
    if not isinstance(document, dict):
        raise RunDirectoryError(f"'{path}' is damaged: it should hold an object, found {type(document).__name__}.")
    return document


@dataclass(frozen=True, kw_only=True)
class LedgerFacts:
    """What the ledger proves about the training samples.

    Attributes:
        epochs_complete: Epochs in which every sample was used exactly once (or found to be unreadable).
        duplicates: Uses of a sample beyond the first within an epoch, over all epochs.
        missing: Samples left out of finished epochs, over all epochs.
        broken: Times a sample could not be read.
    """

    epochs_complete: int
    duplicates: int
    missing: int
    broken: int = 0


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The outcome of a run, written at every stop.

    Attributes:
        status: ``completed``, ``stopped`` (run the same command to resume) or ``failed``.
        step: Optimizer steps done.
        epoch: Epoch of the last step, counted from 1; 0 before the first step.
        samples: Samples seen in training.
        world_size: Number of processes of the last launch.
        weights_sha256: Digest of the model's weights; None if a run with sharded weights failed.
        ema_sha256: Digest of the averaged weights; None without EMA.
        metrics: The last evaluation's metrics by name, and the complete evaluations under ``best`` and ``last``.
        train_seconds: Time spent in steps over all launches, without evaluation, saving and starting up.
        total_seconds: Time the processes ran, over all launches.
        throughput_samples_per_second: Over all steps but each launch's warm-up; None if there were no others.
        throughput_tokens_per_second: Likewise, without padding; also None if samples have no tokens.
        data_wait_fraction: Share of step time spent waiting for data, in [0, 1]; None likewise.
        phase_fractions: Share of each phase of a step, likewise; those that cannot be measured are left out.
        mfu: Model FLOPs utilisation at that throughput, in [0, 1]; None if the device's peak or the FLOPs are not
            known.
        peak_memory_bytes: Peak memory of the first rank: allocated device memory, or resident memory on a CPU; None if
            the device does not report it (Metal).
        parameters: Number of the model's trainable parameters.
        ledger: Result of the ledger; None if it was not counted.
        resumes: How often the run was resumed.
        parent: Of a fork, the ``run_id`` and ``step`` that it began from.
        details: Further facts.
    """

    status: Status
    step: int
    epoch: int
    samples: int
    world_size: int
    weights_sha256: str | None
    ema_sha256: str | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    train_seconds: float
    total_seconds: float
    throughput_samples_per_second: float | None
    throughput_tokens_per_second: float | None = None
    data_wait_fraction: float | None
    mfu: float | None = None
    peak_memory_bytes: int | None
    parameters: int
    ledger: LedgerFacts | None
    resumes: int = 0
    parent: Mapping[str, Any] | None = None
    phase_fractions: Mapping[str, float] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)

    def is_of(self, run_id: str | None) -> bool:
        """Whether it is the outcome of a run with this identity, as far as both are known."""
        return run_id is None or self.details.get("run", run_id) == run_id

    def to_json(self) -> dict[str, Any]:
        """Return the object written to ``summary.json``."""
        document = asdict(self)
        if self.parent is None:
            del document["parent"]
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Summary:
        """Parse the object; keys a later version may have added are ignored.

        Raises:
            RunDirectoryError: If a key is missing.
        """
        arguments = {name: document[name] for name in (one.name for one in fields(cls)) if name in document}
        ledger = arguments.get("ledger")
        try:
            arguments["ledger"] = None if ledger is None else LedgerFacts(**ledger)
            summary = cls(**arguments)
        except TypeError as error:
            raise RunDirectoryError(f"summary.json is damaged: {error}.") from error
        if wrong := wrong_field(fields(cls), document):
            raise RunDirectoryError(f"summary.json is damaged: found {wrong}.")
        return summary


def read_identity(directory: RunDirectory) -> Identity | None:
    """Return a run's identity; None if ``run.json`` is damaged, or missing.

    Raises:
        RunDirectoryError: If it cannot be read.
    """
    try:
        document = read_json(directory.identity)
    except RunDirectoryError as error:
        cause, absent = error.__cause__, (FileNotFoundError, IsADirectoryError, NotADirectoryError)
        if isinstance(error, VersionError) or (isinstance(cause, OSError) and not isinstance(cause, absent)):
            raise
        return None
    run_id, has_checkpoint, parent = (document.get(key) for key in ("id", "has_checkpoint", "parent"))
    if not isinstance(run_id, str) or not isinstance(has_checkpoint, bool):
        return None
    return Identity(run_id, has_checkpoint, parent if isinstance(parent, Mapping) else None)


def recorded_runs(directory: RunDirectory) -> Iterator[str]:
    """Yield the identities that the last launch's event and the outcome name, if ``run.json`` is lost."""
    with contextlib.suppress(RunDirectoryError):
        yield from [str(each["run"]) for each in read_events(directory.events, kinds={"start"}) if "run" in each][-1:]
    with contextlib.suppress(RunDirectoryError):
        yield from map(str, filter(None, [read_summary(directory).details.get("run")]))


def delete_evaluations_after(directory: RunDirectory, position: int) -> None:
    """Remove results of evaluations later than ``position``: the resumed run repeats them."""
    for path in directory.evaluation_files:
        if not path.is_file():
            continue
        try:
            is_later = int(read_json(path)["position"]) > position
        except (RunDirectoryError, KeyError, TypeError, ValueError):
            is_later = True  # a partial file of another disk: nobody could read it
        if is_later:
            path.unlink(missing_ok=True)
