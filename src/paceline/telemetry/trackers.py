"""Trackers: where records go in addition to ``events.jsonl``, for people who watch runs elsewhere.

A tracker receives the same events as the file and is never read back: the file is the truth. Each works in a thread
(``async_tracker.py``), where its library is imported too.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from paceline.errors import RecipeError, did_you_mean
from paceline.records.run_directory import RunDirectory
from paceline.telemetry.async_tracker import AsyncTracker, Tracker


@dataclass(frozen=True, kw_only=True)
class TrackerFacts:
    """What trackers show of a run in addition to its events.

    Attributes:
        name: The run's.
        recipe: What was asked, nested.
        environment: As in ``environment.json``.
        start_step: The step the run resumes from.
    """

    name: str = ""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    start_step: int = 0


def _tensorboard(directory: Path, facts: TrackerFacts) -> Tracker:
    from paceline.telemetry.tensorboard_tracker import TensorBoardTracker

    return TensorBoardTracker(directory, start_step=facts.start_step)


def _mlflow(directory: Path, facts: TrackerFacts) -> Tracker:
    from paceline.telemetry.mlflow_tracker import MlflowTracker

    return MlflowTracker(directory, facts.name, facts.recipe, facts.environment)


def _wandb(directory: Path, facts: TrackerFacts) -> Tracker:
    from paceline.telemetry.wandb_tracker import WandbTracker

    return WandbTracker(directory, facts.name, facts.recipe, facts.environment)


def _csv(directory: Path, _: TrackerFacts) -> Tracker:
    from paceline.telemetry.csv_tracker import CsvTracker

    return CsvTracker(directory)


TRACKERS: Mapping[str, Callable[[Path, TrackerFacts], Tracker]] = {
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
    "wandb": _wandb,
    "csv": _csv,
}


def check_trackers(names: Iterable[str]) -> None:
    """Check before a run begins that its trackers are available.

    Raises:
        RecipeError: If a name is unknown, or its library is not installed.
    """
    for name in names:
        if name not in TRACKERS:
            raise RecipeError(
                f"Found {name!r} in telemetry.trackers; available are: {', '.join(sorted(TRACKERS))}."
                + did_you_mean(name, TRACKERS)
            )
        if importlib.util.find_spec(name) is None:  # a module of Python's own has the name of `csv`
            package = "tensorboard" if name == "tensorboard" else f"'paceline[{name}]'"
            raise RecipeError(
                f"telemetry.trackers asks for {name!r}, which is not installed: run pip install {package}, or "
                "take it out of telemetry.trackers."
            )


def build_trackers(names: Iterable[str], directory: Path, facts: TrackerFacts | None = None) -> list[AsyncTracker]:
    """Build trackers by name; each gets a folder of its name in the run directory.

    Raises:
        RecipeError: If a name is unknown, or its library is not installed.
    """
    wanted = list(names)
    check_trackers(wanted)
    shown = facts or TrackerFacts()
    events = RunDirectory(directory).events
    return [AsyncTracker(name, partial(TRACKERS[name], directory / name, shown), earlier=events) for name in wanted]
