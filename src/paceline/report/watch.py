"""How does a run stand, as far as its directory says: where it is, how long it will take, what it found?"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline.errors import RunDirectoryError
from paceline.records.reader import NO_METRICS, read_plan
from paceline.records.run_directory import RunDirectory, existing_run
from paceline.report.following import EventFollower, is_being_trained
from paceline.telemetry.meter import PHASES

State = Literal["starting", "running", "completed", "stopped", "failed", "gone"]

# A launcher that starts a run again takes its time; and so does a long step.
GONE_SECONDS = 60.0
# Records over which the phases' shares and the pace are taken.
_LATELY = 20
_PACE = 200


@dataclass
class Told:
    """What the events say; made anew when they are cut back."""

    start: Mapping[str, Any] = field(default_factory=dict)
    steps: list[Mapping[str, Any]] = field(default_factory=list)
    since_launch: int = 0
    evaluations: list[Mapping[str, Any]] = field(default_factory=list)
    incidents: list[Mapping[str, Any]] = field(default_factory=list)
    checkpoints: list[Mapping[str, Any]] = field(default_factory=list)
    last: Mapping[str, Any] = field(default_factory=dict)
    finish: Mapping[str, Any] = field(default_factory=dict)
    resumes: int = 0

    def take(self, event: Mapping[str, Any]) -> None:
        """Take one event."""
        self.last = event
        match event["event"]:
            case "start":
                self.start, self.finish, self.since_launch = event, {}, len(self.steps)
            case "resume":
                self.resumes = int(event["resumes"])
            case "step":
                self.steps.append(event)
            case "evaluation":
                self.evaluations.append(event)
            case "incident":
                self.incidents.append(event)
            case "checkpoint":
                self.checkpoints.append(event)
            case "finish":
                self.finish = event


class WatchedRun:
    """One run, looked at now and then.

    Args:
        run: Its directory.

    Raises:
        RunDirectoryError: If there is none, or its files are damaged; also later.
    """

    def __init__(self, run: Path) -> None:
        self.path = run
        self.directory: RunDirectory = existing_run(run)
        self.told = Told()
        self.plan: Mapping[str, Any] = {}
        self._follower = EventFollower(self.directory.events)
        self._quiet_since = time.monotonic()
        self._is_first_look = True

    def look(self) -> list[dict[str, Any]]:
        """Read what is new; returns it."""
        is_cut, events = self._follower.read()
        if is_cut:
            self.told = Told()
        for event in events:
            self.told.take(event)
        if events or is_cut:
            self._quiet_since = time.monotonic()
        if not self.plan or any(event["event"] == "start" for event in events):
            self.plan = self._read_plan()
        if self._is_first_look:
            # What has been silent for long need not be waited for.
            self._quiet_since -= max(0.0, time.time() - self.told.last.get("time", time.time()))
            self._is_first_look = False
        return events

    @property
    def name(self) -> str:
        """How the run is called."""
        return str(self.path)

    @property
    def state(self) -> State:
        """What it does; ``gone`` if it ended without a word, as processes do that are killed."""
        if self.told.finish:
            return _state_of(str(self.told.finish["status"]))
        is_quiet = time.monotonic() - self._quiet_since > GONE_SECONDS
        if is_quiet and is_being_trained(self.directory) is False:
            return "gone"
        return "running" if self.told.start else "starting"

    @property
    def metrics(self) -> list[str]:
        """Names of what its evaluations measured; the loss first, then what one looks at first."""
        found = dict.fromkeys(key for each in self.told.evaluations for key in each if key not in NO_METRICS)
        front = [name for name in dict.fromkeys(("loss", self.headline)) if name in found]
        return [*front, *(name for name in found if name not in front)]

    @property
    def headline(self) -> str:
        """The metric that one looks at first."""
        # Plans did not say it at first; those runs were of images.
        return str(self.plan.get("headline", "top1_accuracy"))

    @property
    def sample_name(self) -> str:
        """What its samples are called."""
        return str(self.plan.get("sample_name", "samples"))

    def is_higher_better(self, metric: str) -> bool:
        """Which way a metric is better."""
        told: Mapping[str, bool] = self.plan.get("higher_is_better") or {}
        return told.get(metric, metric != "loss")

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to wait for."""
        return self.state not in ("starting", "running")

    @property
    def step(self) -> int:
        """Steps done, as far as was told."""
        return int(self.told.last.get("step", 0))

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run."""
        total: int | None = self.told.start.get("total_steps", self.plan.get("total_steps"))
        return total

    @property
    def epoch(self) -> int | None:
        """Epoch of the last record, from 1."""
        return int(self.told.steps[-1]["epoch"]) if self.told.steps else None

    @property
    def epochs(self) -> int | None:
        """Epochs of the whole run, a last partial one included."""
        total = self.plan.get("total_epochs")
        return None if total is None else math.ceil(total)

    @property
    def record(self) -> Mapping[str, Any]:
        """The last step record; empty before the first."""
        return self.told.steps[-1] if self.told.steps else {}

    @property
    def seconds_left(self) -> float | None:
        """Time to the end at the pace of this launch's last records, evaluations and saves included."""
        lately = self.told.steps[self.told.since_launch :][-_PACE:]
        total = self.total_steps
        if self.is_over or total is None or len(lately) < 2 or lately[-1]["step"] == lately[0]["step"]:
            return None
        seconds = (lately[-1]["time"] - lately[0]["time"]) / (lately[-1]["step"] - lately[0]["step"])
        left: float = seconds * (total - lately[-1]["step"]) - (time.time() - lately[-1]["time"])
        return max(0.0, left)

    @property
    def seconds_since_last(self) -> float | None:
        """How long ago something was told; None before the first, and never negative: clocks of hosts differ."""
        told = self.told.last.get("time")
        return None if told is None else max(0.0, time.time() - told)

    @property
    def headline_weights(self) -> str:
        """Whose evaluations stand for the run: the average's where there is one."""
        return "ema" if any(each["weights"] == "ema" for each in self.told.evaluations) else "model"

    def curve(self, key: str, *, evaluations: bool = False) -> list[tuple[float, float]]:
        """(step, value) of all records that have a number there."""
        source: Iterable[Mapping[str, Any]] = self.told.steps
        if evaluations:
            source = (each for each in self.told.evaluations if each["weights"] == self.headline_weights)
        return [(each["step"], each[key]) for each in source if isinstance(each.get(key), int | float)]

    def phases(self) -> dict[str, float]:
        """Shares of the phases in the time of a step, over the last records."""
        lately = self.told.steps[-_LATELY:]
        whole = sum(each.get("step_seconds") or 0.0 for each in lately)
        if not whole:
            return {}
        sums = {phase: sum(each.get(f"{phase}_seconds") or 0.0 for each in lately) for phase in PHASES}
        return {phase: seconds / whole for phase, seconds in sums.items() if seconds}

    def to_json(self) -> dict[str, Any]:
        """How it stands now, for programs."""
        last = {each["weights"]: dict(each) for each in self.told.evaluations}
        return {
            "run_dir": self.name,
            "status": self.state,
            "step": self.step,
            "total_steps": self.total_steps,
            "epoch": self.epoch,
            "total_epochs": self.plan.get("total_epochs"),
            "world_size": self.told.start.get("world_size"),
            "resumes": self.told.resumes,
            "seconds_left": self.seconds_left,
            "seconds_since_last_event": self.seconds_since_last,
            "last_step": dict(self.record),
            "last_evaluations": last,
            "phases": self.phases(),
            "incidents": [dict(each) for each in self.told.incidents],
            "checkpoints": self._kept_checkpoints(),
            "message": self.told.finish.get("message"),
        }

    def _kept_checkpoints(self) -> list[str]:
        """Those that a run still has: it removes old ones."""
        folder = self.directory.checkpoints
        return [name for each in self.told.checkpoints if (folder / (name := each["checkpoint"])).is_dir()]

    def _read_plan(self) -> Mapping[str, Any]:
        try:
            return read_plan(self.directory)
        except RunDirectoryError:
            return {}  # being written, or of a version that had none: the events say enough


def _state_of(status: str) -> State:
    match status:
        case "completed" | "stopped" | "failed":
            return status
        case _:
            return "failed"
