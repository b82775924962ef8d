"""Progress of a run, read from its directory while it trains: position, time left, results.

The events file is opened anew at each look: a network file system shows then what another host has written.
"""

from __future__ import annotations

import math
import re
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline.errors import RunDirectoryError
from paceline.records.reader import NO_METRICS, read_environment, read_plan
from paceline.records.run_directory import RunDirectory, cannot, existing_run, refuse_odd_record
from paceline.records.writer import parse_line
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
            status: State = self.told.finish["status"]
            return status if status in ("completed", "stopped") else "failed"
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

    def curve(self, key: str, *, evaluations: bool = False) -> list[tuple[float, float]]:
        """(step, value) of all records that have a number there; evaluations of the average where there is one."""
        source: Iterable[Mapping[str, Any]] = self.told.steps
        if evaluations:
            weights = "ema" if any(each["weights"] == "ema" for each in self.told.evaluations) else "model"
            source = (each for each in self.told.evaluations if each["weights"] == weights)
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
            "last_evaluations": {each["weights"]: dict(each) for each in self.told.evaluations},
            "phases": self.phases(),
            "incidents": [dict(each) for each in self.told.incidents],
            # The run removes old ones.
            "checkpoints": [
                name
                for each in self.told.checkpoints
                if (self.directory.checkpoints / (name := each["checkpoint"])).is_dir()
            ],
            "message": self.told.finish.get("message"),
        }

    def _read_plan(self) -> Mapping[str, Any]:
        try:
            return read_plan(self.directory)
        except RunDirectoryError:
            return {}  # being written, or of a version that had none: the events say enough


class EventFollower:
    """Reads a growing file of events; lines that are not whole yet are read the next time.

    Args:
        path: The file, which need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._number = 0
        self._last = b""

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Whether the file was cut back since, and what is new: after a cut, all of it.

        Raises:
            RunDirectoryError: If the file cannot be read, or a line is no event.
        """
        refuse_odd_record(self._path)
        try:
            with self._path.open("rb") as file:
                file.seek(max(0, self._offset - len(self._last)))
                found = file.read()
                is_cut = not found.startswith(self._last)
                if is_cut:
                    self._offset, self._number, self._last = 0, 0, b""
                    file.seek(0)
                    found = file.read()
        except FileNotFoundError:
            is_cut = self._offset > 0
            self._offset, self._number, self._last = 0, 0, b""
            return is_cut, []
        except OSError as error:
            raise cannot("read", self._path, error) from error
        return is_cut, self._events(found[len(self._last) :])

    def _events(self, found: bytes) -> list[dict[str, Any]]:
        events = []
        for line in found.splitlines(keepends=True):
            # A network's file system may show a line's place before it shows its text.
            if not line.endswith(b"\n") or b"\0" in line:
                break
            self._number += 1
            event = parse_line(line, self._path, self._number, is_last=False)
            assert event is not None  # only lines without their end are
            events.append(event)
            self._offset += len(line)
            self._last = line
        return events


def is_being_trained(directory: RunDirectory) -> bool | None:
    """Whether a process trains in a run directory now; None where that cannot be known from here.

    The lock is not tried, only looked up: a run that begins at this very moment must find it free.
    """
    if read_environment(directory).get("host") != socket.gethostname():
        return None
    try:
        inode = (directory.root / ".lock").stat().st_ino
        locks = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except (OSError, RunDirectoryError):
        return None
    return is_locked(locks, inode)


def is_locked(locks: Iterable[str], inode: int) -> bool:
    """Whether one of the lines of ``/proc/locks`` is of a file, which they name as ``MAJOR:MINOR:INODE``."""
    return any(re.fullmatch(rf"[^:]+:[^:]+:{inode}", word) for lock in locks for word in lock.split())
