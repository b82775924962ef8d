"""What do the files of a run directory say? For reports, audits and people's scripts; needs no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from paceline.errors import RunDirectoryError
from paceline.plain_json import load_json
from paceline.plain_yaml import BoundedLoader
from paceline.records.run_directory import RunDirectory, cannot, existing_run, refuse_odd_record
from paceline.records.summary import Summary
from paceline.records.writer import parse_line

# Words in the names of what a clock decides.
_CLOCK_WORDS = ("time", "seconds", "throughput", "data_wait_fraction", "mfu", "slowest")


def without_clock(event: Mapping[str, Any]) -> dict[str, Any]:
    """What of an event must be the same in a run that was interrupted and in one that was not."""
    return {key: value for key, value in event.items() if not any(word in key for word in _CLOCK_WORDS)}


def read_events(path: Path, *, kinds: Collection[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the events of a file in order, those of some kinds only if asked; a torn last line is left out.

    Raises:
        RunDirectoryError: If the file cannot be read or a line is no event.
    """
    refuse_odd_record(path)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                # Only the last line of a file can lack its end.
                event = parse_line(line, path, number, is_last=not line.endswith(b"\n"))
                if event is not None and (kinds is None or event["event"] in kinds):
                    yield event
    except OSError as error:
        raise cannot("read", path, error) from error


def read_summary(run: RunDirectory) -> Summary:
    """Read ``summary.json``.

    Raises:
        RunDirectoryError: If it is missing or damaged.
    """
    return Summary.from_json(read_json(run.summary))


# Keys of an evaluation that are no metric.
NO_METRICS = frozenset(
    {"event", "step", "position", "time", "epoch", "split", "weights", "samples", "seconds", "train_seconds"}
    | {"input_mean", "input_std"}
)


def read_plan(run: RunDirectory) -> dict[str, Any]:
    """Read ``plan.json``.

    Raises:
        RunDirectoryError: If it is missing or damaged.
    """
    return read_json(run.plan)


# What a run's continuation, and its audit, are compared with.
_NEEDED = {
    "strategy": str,
    "data": dict,
    "batch_phases": list,
    "total_steps": int,
    "train_samples": int,
    "global_batch_size": int,
}


def read_plan_to_resume(run: RunDirectory) -> dict[str, Any]:
    """Read ``plan.json`` where its main numbers are needed.

    Raises:
        RunDirectoryError: If it is missing, damaged, or lacks one of them.
    """
    plan = {"batch_phases": [], **read_plan(run)}  # which runs of earlier versions lack
    for key, kind in _NEEDED.items():
        if not isinstance(plan.get(key), kind):
            raise RunDirectoryError(
                f"'{run.plan}' is damaged: found {key}={str(plan.get(key))[:80]}. Restore it from a "
                "copy, or start the run in another directory."
            )
    return plan


def read_environment(run: RunDirectory) -> dict[str, Any]:
    """Read ``environment.json``, or return nothing where there is none: no number depends on it.

    Raises:
        RunDirectoryError: If it is damaged.
    """
    return read_json(run.environment) if run.environment.is_file() else {}


def read_recipe(run: RunDirectory) -> dict[str, Any]:
    """Read ``recipe.yaml`` as plain values; ``paceline.recipe`` turns them into a recipe.

    Raises:
        RunDirectoryError: If there is no run, or it is damaged.
    """
    existing_run(run.root)
    try:
        # The values of PyYAML's SafeLoader, with which earlier versions wrote it.
        document = yaml.load(_read_text(run.recipe), Loader=BoundedLoader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or number that there is none of
        raise RunDirectoryError(f"'{run.recipe}' is damaged: {' '.join(str(error).split())}") from error
    return _mapping(document, run.recipe)


def read_json(path: Path) -> dict[str, Any]:
    """Read one of the run directory's JSON files.

    Raises:
        RunDirectoryError: If it is missing, damaged, or holds no object.
    """
    try:
        document = load_json(_read_text(path))
    except ValueError as error:
        raise RunDirectoryError(f"'{path}' is damaged: {error}.") from error
    return _mapping(document, path)


def _read_text(path: Path) -> str:
    """Read a file, wording its absence for the user."""
    refuse_odd_record(path)
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise RunDirectoryError(
            f"'{path.parent}' holds no {path.name}: name the directory of a run that was started."
        ) from error
    except OSError as error:
        raise cannot("read", path, error) from error
    except UnicodeDecodeError as error:
        raise RunDirectoryError(f"'{path}' is damaged: {error}.") from error


def _mapping(document: Any, path: Path) -> dict[str, Any]:
    """Return the document if it is an object."""
    if not isinstance(document, dict):
        raise RunDirectoryError(f"'{path}' is damaged: it should hold an object, found {type(document).__name__}.")
    return document
