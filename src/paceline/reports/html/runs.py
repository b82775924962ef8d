"""Run directories as the report reads them: completed, running or failed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from paceline.errors import RunDirectoryError
from paceline.learning.evidence import evidence_in
from paceline.learning.judge import Judgement, judge
from paceline.records.reader import (
    NO_METRICS,
    Summary,
    read_environment,
    read_for_report,
    read_json,
    read_plan,
    read_recipe,
    read_summary,
)
from paceline.records.run_directory import RunDirectory, existing_run
from paceline.reports.attribution import Attribution, attribute_events

Event = Mapping[str, Any]
WEIGHTS = ("model", "ema")

# For runs whose plan is missing or cannot be read.
_USUAL_DIRECTIONS = {"loss": False, "top1_accuracy": True, "top5_accuracy": True}


class RunHistory:
    """A run as recorded in its plan and events.

    Attributes:
        events: In order.
        plan: Empty if not written yet.
    """

    events: Sequence[Event]
    plan: Mapping[str, Any]

    def of(self, kind: str) -> list[Event]:
        """Return the events of one kind."""
        return self._by_kind.get(kind, [])

    @cached_property
    def _by_kind(self) -> dict[str, list[Event]]:
        kinds: dict[str, list[Event]] = {}
        for event in self.events:
            kinds.setdefault(event["event"], []).append(event)
        return kinds

    @property
    def start(self) -> Event:
        """Start event of the last launch; empty before the first."""
        return self.of("start")[-1] if self.of("start") else {}

    @property
    def step(self) -> int:
        """Optimizer steps recorded so far."""
        return int(self.events[-1]["step"]) if self.events else 0

    @property
    def total_steps(self) -> int | None:
        """Planned number of steps."""
        total: int | None = self.start.get("total_steps", self.plan.get("total_steps"))
        return total

    @property
    def evaluations(self) -> dict[str, list[Event]]:
        """Evaluations by their weights, ``model`` and ``ema``; if there are several held-out sets, also by name."""
        sets = list(dict.fromkeys(event.get("split", "") for event in self.of("evaluation")))
        found: dict[str, list[Event]] = {}
        for name, weights in product(sets, WEIGHTS):
            events = [
                each for each in self.of("evaluation") if (each.get("split", ""), each["weights"]) == (name, weights)
            ]
            found[weights if len(sets) == 1 else f"{name}, {weights}"] = events
        return found

    @property
    def metrics(self) -> list[str]:
        """Names of evaluated metrics."""
        return list(dict.fromkeys(key for event in self.of("evaluation") for key in event if key not in NO_METRICS))

    @property
    def headline(self) -> str:
        """The main metric."""
        # Old plans, all of image runs, did not name it.
        return str(self.plan.get("headline", "top1_accuracy"))

    def judged(self, run: RunDirectory, recipe: Mapping[str, Any], warning: str = "") -> Judgement:
        """Judge whether it learns.

        Args:
            run: Its directory.
            recipe: Its recipe.
            warning: Its own warning.
        """
        return judge(evidence_in(self.events, plan=self.plan, recipe=recipe, confusion=run.confusion, warning=warning))

    def higher_is_better(self, metric: str) -> bool | None:
        """Whether higher is better for a metric; None if unknown."""
        directions = self.plan.get("higher_is_better") or _USUAL_DIRECTIONS
        return directions.get(metric) if isinstance(directions, Mapping) else None


@dataclass(frozen=True, kw_only=True)
class RunRecord(RunHistory):
    """One run as recorded in its files.

    Attributes:
        path: The run directory.
        name: Its unique name in the report.
        recipe: By dotted key, without the keys that the run does not use.
        environment: Empty if the file is missing.
        last_summary: Outcome of its last stop, possibly of an earlier launch.
        left_out: Files that could not be read, and records that are not used, one sentence each.
    """

    path: Path
    name: str
    events: Sequence[Event]
    plan: Mapping[str, Any]
    recipe: Mapping[str, Any]
    environment: Mapping[str, Any]
    last_summary: Summary | None
    left_out: tuple[str, ...] = field(default=())

    @cached_property
    def finish(self) -> Event | None:
        """End event of the last launch; None while it is running or if it was killed."""
        endings = (event for event in reversed(self.events) if event["event"] in ("finish", "start"))
        last = next(endings, None)
        return last if last is not None and last["event"] == "finish" else None

    @property
    def summary(self) -> Summary | None:
        """Outcome of the last launch, if it has ended."""
        return self.last_summary if self.finish is not None else None

    @cached_property
    def judgement(self) -> Judgement:
        """Whether it learns, and the likely cause if not."""
        warning = "" if self.summary is None else str(self.summary.details.get("warning", ""))
        return self.judged(RunDirectory(self.path), self.recipe, warning)

    @property
    def status(self) -> str:
        """``completed``, ``stopped``, ``failed``, ``unfinished`` (running, or killed) or ``not begun``."""
        if self.finish is not None:
            return str(self.finish["status"])
        return "unfinished" if self.events else "not begun"

    @property
    def world_size(self) -> int:
        """World size of the last launch."""
        return int(self.start.get("world_size", self.plan.get("world_size", 1)))

    @property
    def weight_unit(self) -> str:
        """Unit of sample weights in the mean loss, such as ``tokens``."""
        return str(self.plan.get("weight_unit", "samples"))

    @cached_property
    def attribution(self) -> Attribution | None:
        """Step time by phase; None without a usable step record."""
        try:
            timed = (each for each in self.events if each["event"] in ("start", "step"))
            return attribute_events(self.path, timed, self.plan)
        except (RunDirectoryError, KeyError):
            return None

    def extra(self, name: str) -> Mapping[str, Any] | None:
        """Read a file that another command left in the run directory; None if it is missing or unreadable."""
        with contextlib.suppress(RunDirectoryError):
            return read_json(self.path / name)
        return None


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Read runs, each under a unique name.

    Raises:
        RunDirectoryError: If one of them is not a run, or its events cannot be read.
    """
    unique = {os.path.realpath(path): path for path in paths}
    parts = [Path(each).parts for each in unique]
    # The shortest path suffixes that distinguish them.
    suffixes = (["/".join(each[-length:]) for each in parts] for length in range(1, max(map(len, parts), default=1)))
    names = next((each for each in suffixes if len(set(each)) == len(each)), list(unique))
    return [_read(path, name) for path, name in zip(unique.values(), names, strict=True)]


def _read(path: Path, name: str) -> RunRecord:
    directory = existing_run(path)
    unreadable_files: list[str] = []

    def read_or(reader: Any, default: Any) -> Any:
        try:
            return reader(directory)
        except RunDirectoryError as error:
            unreadable_files.append(str(error))
            return default

    events, notes = read_for_report(directory.events) if directory.events.exists() else ([], ())
    plan = read_or(read_plan, {}) if directory.plan.exists() else {}
    recipe, unused = flattened(read_or(read_recipe, {})), plan.get("unused") or {}
    return RunRecord(
        path=path,
        name=name,
        events=events,
        plan=plan,
        recipe={key: value for key, value in recipe.items() if key not in unused},
        environment=read_or(read_environment, {}),
        last_summary=read_or(read_summary, None) if directory.summary.exists() else None,
        left_out=(*unreadable_files, *notes),
    )


def flattened(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return a tree's values by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{path}{key}.")
        else:
            flat[f"{path}{key}"] = value
    return flat
