"""Run directories as a report needs them: completed, running or failed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.errors import RunDirectoryError
from paceline.records.reader import (
    NO_METRICS,
    Summary,
    read_environment,
    read_events,
    read_json,
    read_plan,
    read_recipe,
    read_summary,
)
from paceline.records.run_directory import existing_run
from paceline.report.attribution import Attribution, attribute_events

Event = Mapping[str, Any]

# What plans did not say at first, of the metrics that there were.
_OF_OLD_RUNS = {"loss": False, "top1_accuracy": True, "top5_accuracy": True}


class Happened:
    """A run as its plan and its events tell it.

    Attributes:
        events: In order.
        plan: Empty where there is none yet.
    """

    events: Sequence[Event]
    plan: Mapping[str, Any]

    def of(self, kind: str) -> list[Event]:
        """The events of one kind."""
        return self._by_kind.get(kind, [])

    @cached_property
    def _by_kind(self) -> dict[str, list[Event]]:
        kinds: dict[str, list[Event]] = {}
        for event in self.events:
            kinds.setdefault(event["event"], []).append(event)
        return kinds

    @property
    def start(self) -> Event:
        """The beginning of the last launch; empty before the first."""
        return self.of("start")[-1] if self.of("start") else {}

    @property
    def step(self) -> int:
        """Optimizer steps that the records know of."""
        return int(self.events[-1]["step"]) if self.events else 0

    @property
    def total_steps(self) -> int | None:
        """Steps that were planned."""
        total: int | None = self.start.get("total_steps", self.plan.get("total_steps"))
        return total

    @property
    def metrics(self) -> list[str]:
        """Names of what evaluations measured."""
        return list(dict.fromkeys(key for event in self.of("evaluation") for key in event if key not in NO_METRICS))

    @property
    def headline(self) -> str:
        """The main metric."""
        # Plans did not say it at first; those runs were of images.
        return str(self.plan.get("headline", "top1_accuracy"))

    def higher_is_better(self, metric: str) -> bool | None:
        """Which way a metric is better; None if unknown."""
        told: Mapping[str, bool] = self.plan.get("higher_is_better") or _OF_OLD_RUNS
        return told.get(metric)


@dataclass(frozen=True, kw_only=True)
class RunRecord(Happened):
    """One run as its files tell it.

    Attributes:
        path: The run directory.
        name: Its unique name in the report.
        recipe: By dotted key.
        environment: Empty where there is none.
        last_summary: The outcome of its last stop, which may be of an earlier launch.
        complaints: What could not be read, one sentence each.
    """

    path: Path
    name: str
    events: Sequence[Event]
    plan: Mapping[str, Any]
    recipe: Mapping[str, Any]
    environment: Mapping[str, Any]
    last_summary: Summary | None
    complaints: tuple[str, ...] = field(default=())

    @cached_property
    def finish(self) -> Event | None:
        """The end of the last launch; None while it is under way, or where it was killed."""
        ends = (event for event in reversed(self.events) if event["event"] in ("finish", "start"))
        last = next(ends, None)
        return last if last is not None and last["event"] == "finish" else None

    @property
    def summary(self) -> Summary | None:
        """The outcome, if the last launch has come to one."""
        return self.last_summary if self.finish is not None else None

    @property
    def status(self) -> str:
        """``completed``, ``stopped``, ``failed``, ``unfinished`` (under way, or killed) or ``not begun``."""
        if self.finish is not None:
            return str(self.finish["status"])
        return "unfinished" if self.events else "not begun"

    @property
    def world_size(self) -> int:
        """Processes of the last launch."""
        return int(self.start.get("world_size", self.plan.get("world_size", 1)))

    @property
    def weight_unit(self) -> str:
        """What samples count for in the mean loss: ``tokens``, say."""
        return str(self.plan.get("weight_unit", "samples"))

    @cached_property
    def attribution(self) -> Attribution | None:
        """Where the time of its steps went; None without a step record that tells."""
        try:
            timed = (each for each in self.events if each["event"] in ("start", "step"))
            return attribute_events(self.path, timed, self.plan)
        except (RunDirectoryError, KeyError):
            return None

    def extra(self, name: str) -> Mapping[str, Any] | None:
        """What another command left in the run directory; None where there is no such file, or it cannot be read."""
        with contextlib.suppress(RunDirectoryError):
            return read_json(self.path / name)
        return None


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Read runs, each under a unique name.

    Raises:
        RunDirectoryError: If one of them is no run, or its events cannot be read.
    """
    unique = {os.path.realpath(path): path for path in paths}
    parts = [Path(each).parts for each in unique]
    # The shortest ends of their paths that tell them apart.
    ends = (["/".join(each[-length:]) for each in parts] for length in range(1, max(map(len, parts), default=1)))
    names = next((each for each in ends if len(set(each)) == len(each)), list(unique))
    return [_read(path, name) for path, name in zip(unique.values(), names, strict=True)]


def _read(path: Path, name: str) -> RunRecord:
    directory = existing_run(path)
    complaints: list[str] = []

    def told(read: Any, otherwise: Any) -> Any:
        try:
            return read(directory)
        except RunDirectoryError as error:
            complaints.append(str(error))
            return otherwise

    return RunRecord(
        path=path,
        name=name,
        events=list(read_events(directory.events)) if directory.events.is_file() else [],
        plan=told(read_plan, {}) if directory.plan.is_file() else {},
        recipe=flattened(told(read_recipe, {})),
        environment=told(read_environment, {}),
        last_summary=told(read_summary, None) if directory.summary.is_file() else None,
        complaints=tuple(complaints),
    )


def flattened(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """A tree's values by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{path}{key}.")
        else:
            flat[f"{path}{key}"] = value
    return flat
