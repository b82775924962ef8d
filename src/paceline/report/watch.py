"""Progress of a run, read from its directory while it trains, and drawn in a terminal.

The events file is opened anew at each look: a network file system shows then what another host has written.
"""

from __future__ import annotations

import math
import re
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.errors import RunDirectoryError
from paceline.records.events import parse_line
from paceline.records.reader import NO_METRICS, read_environment, read_plan
from paceline.records.run_directory import RunDirectory, cannot, existing_run, refuse_odd_record
from paceline.telemetry.display import describe, figures
from paceline.telemetry.meter import PHASES
from paceline.units import format_metric, format_seconds, metric_title, metric_unit

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

Points = Sequence[tuple[float, float]]
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


_STYLES: Mapping[State, str] = {"completed": "green", "failed": "bold red", "gone": "bold red", "stopped": "yellow"}
_WORDS: Mapping[State, str] = {"gone": "gone without a word: nobody trains here"}
_MOST_EVALUATIONS = 4
_MOST_METRICS = 6
_MOST_INCIDENTS = 3
_WIDE = 100
# Rows that are not curves.
_OTHER_ROWS = 18
_LEAST_CHART_ROWS, _MOST_CHART_ROWS = 3, 14


def line_of(event: Mapping[str, Any], run: WatchedRun) -> str | None:
    """One line for an event, as ``paceline train`` writes it to a file; None where there is nothing to tell."""
    if event["event"] == "finish":
        said = f": {event['message']}" if event.get("message") else ""
        return f"step {event['step']}  {event['status']}{said}"
    if event["event"] != "step":
        return describe(event)
    return "  ".join(part for part in (_place(event, run), figures(event, run.sample_name)) if part)


def _place(event: Mapping[str, Any], run: WatchedRun) -> str:
    epoch = f"epoch {event['epoch']}" + (f"/{run.epochs}" if run.epochs else "")
    return f"{epoch}  step {event['step']}" + (f"/{run.total_steps}" if run.total_steps else "")


def ending_of(run: WatchedRun) -> str:
    """How a run ended, in a line."""
    told = run.told.finish.get("message") or ""
    return (
        f"{run.name}: {_WORDS.get(run.state, run.state)}, step {run.step}"
        + (f"/{run.total_steps}" if run.total_steps else "")
        + (f": {told}" if told else "")
    )


def screen(run: WatchedRun, console: Console) -> RenderableType:
    """Everything about one run, as high as the terminal at most."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [_title(run), _bar(run, console.width)]
    if run.record:
        parts.append(Text(figures(run.record, run.sample_name)))
    parts += [_charts(run, console), _phases(run, console.width)]
    if run.told.evaluations:
        parts.append(_evaluations(run))
    parts += [Text(f"{describe(each)}", style="yellow") for each in run.told.incidents[-_MOST_INCIDENTS:]]
    if run.told.checkpoints:
        newest = run.told.checkpoints[-1]["checkpoint"]
        parts.append(Text(f"checkpoints: {len(run.told.checkpoints)} saved, the last is {newest}", style="dim"))
    if run.directory.tensorboard.is_dir():
        parts.append(Text(f"in a browser: tensorboard --logdir {run.directory.tensorboard}", style="dim"))
    return Group(*parts)


def table(runs: Sequence[WatchedRun]) -> Table:
    """Several runs, a line each."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    found = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("run", "status", "epoch", "step", "loss", "evaluated", "samples/s", "data wait", "left", "incidents"):
        found.add_column(name, overflow="fold" if name == "run" else "ellipsis", no_wrap=name != "run")
    for run in runs:
        cells = row(run)
        # As a Text, since a name may have brackets, which would be markup.
        found.add_row(Text(cells[0]), Text(cells[1], style=_STYLES.get(run.state, "")), *cells[2:])
    return found


def row(run: WatchedRun) -> tuple[str, ...]:
    """The cells of one run."""
    record, name = run.record, run.headline if run.headline in run.metrics else "loss"
    scored = run.curve(name, evaluations=True)
    title = "top-1" if name == "top1_accuracy" else metric_title(name)
    evaluated = f"{title} {format_metric(name, scored[-1][1])}" if scored else ""
    left = run.seconds_left
    return (
        run.name,
        run.state,
        "" if run.epoch is None else f"{run.epoch}/{run.epochs or '?'}",
        f"{run.step}/{run.total_steps or '?'}",
        _number(record.get("loss"), "{:.4g}"),
        evaluated,
        _number(record.get("throughput_samples_per_second"), "{:,.0f}"),
        _number(record.get("data_wait_fraction"), "{:.0%}"),
        "" if left is None else format_seconds(left),
        str(len(run.told.incidents) or ""),
    )


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _title(run: WatchedRun) -> Text:
    from rich.text import Text

    ranks = run.told.start.get("world_size")
    facts = [str(run.told.start.get("recipe", "")), f"{ranks} process{'es' * (ranks != 1)}" if ranks else ""]
    if run.told.resumes:
        facts.append(f"resumed {run.told.resumes} time{'s' * (run.told.resumes != 1)}")
    since = run.seconds_since_last
    if since is not None and not run.is_over:
        facts.append(f"last heard of {format_seconds(since)} ago")
    title = Text(run.name, style="bold")
    title.append(f"  {_WORDS.get(run.state, run.state)}", style=_STYLES.get(run.state, "cyan"))
    return title.append("  " + "  ".join(filter(None, facts)), style="not bold dim")


def _bar(run: WatchedRun, width: int) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    total, left = run.total_steps or 0, run.seconds_left
    epoch = "" if run.epoch is None else f"epoch {run.epoch}/{run.epochs or '?'}  "
    grid = Table.grid(padding=(0, 1))
    grid.add_row(
        f"{epoch}step {run.step}/{total or '?'}",
        ProgressBar(total=total or 1, completed=run.step, width=max(10, min(50, width - 55))),
        f"{run.step / total:.0%}" if total else "",
        "" if left is None else f"{format_seconds(left)} left",
    )
    return grid


def _charts(run: WatchedRun, console: Console) -> RenderableType:
    """The training loss, and beside it how good the run is."""
    from rich.table import Table

    name = run.headline if run.headline in run.metrics else "loss"
    scored = run.curve(name, evaluations=True)
    beside = (f"{', '.join(filter(None, (metric_title(name), metric_unit(name))))} (evaluations)", scored)
    if not scored:
        beside = (f"{run.sample_name}/s", run.curve("throughput_samples_per_second"))
    charts = [("training loss", run.curve("loss")), beside]
    is_wide = console.width >= _WIDE
    rows = (console.height - _OTHER_ROWS) // (1 if is_wide else 2)
    rows = min(_MOST_CHART_ROWS, max(_LEAST_CHART_ROWS, rows))
    width = (console.width - 4) // 2 if is_wide else min(console.width, _WIDE) - 2
    grid = Table.grid(padding=(0, 2))
    drawn = [_chart(name, points, width, rows, console) for name, points in charts]
    for cells in [drawn] if is_wide else [[each] for each in drawn]:
        grid.add_row(*cells)
    return grid


def _chart(name: str, points: Points, width: int, rows: int, console: Console) -> Text:
    from rich.text import Text

    has_braille = console.encoding.lower().startswith("utf")
    drawn = Text(f"{name}\n", style="bold")
    return drawn.append(
        "\n".join(draw_chart(points, width=width, height=rows, has_braille=has_braille)), "not bold cyan"
    )


def _phases(run: WatchedRun, width: int) -> Text:
    """Where the time of a step goes, from the last records."""
    from rich.text import Text

    shares = sorted(run.phases().items(), key=lambda each: -each[1])
    seconds = run.record.get("step_seconds")
    if not shares or not seconds:
        return Text("")
    named = "  ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in shares if share >= 0.005)
    return Text(f"a step, {1e3 * seconds:.4g} ms: {named}")


def _evaluations(run: WatchedRun) -> Table:
    from rich import box
    from rich.table import Table

    told = run.told.evaluations
    names = run.metrics[:_MOST_METRICS]
    found = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("step", "weights", *names):
        found.add_column(metric_title(name).replace(" accuracy", " %"), justify="right")
    known = [each[run.headline] for each in told if each.get(run.headline) is not None]
    best = (max if run.is_higher_better(run.headline) else min)(known, default=None)
    for each in told[-_MOST_EVALUATIONS:]:
        values = [_number(each.get(name), "{:.2f}" if metric_unit(name) else "{:.4g}") for name in names]
        is_best = best is not None and each.get(run.headline) == best
        found.add_row(str(each["step"]), str(each["weights"]), *values, style="bold" if is_best else None)
    return found


# Bits of a Braille character by row and column of its dots.
_BITS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
_EMPTY = 0x2800


def draw_chart(points: Points, *, width: int, height: int, has_braille: bool = True) -> list[str]:
    """Draw a curve, with the highest and the lowest value at its left and the first and last place below.

    Args:
        points: (place, value) in ascending order; values that are no numbers are left out.
        width: Columns in all.
        height: Rows of the curve itself; one more says the places.
        has_braille: Whether the terminal shows Braille letters.
    """
    known = np.array([each for each in points if np.isfinite(each[1])], dtype=np.float64).reshape(-1, 2)
    if len(known) == 0:
        return ["(nothing yet)"]
    low, high = float(known[:, 1].min()), float(known[:, 1].max())
    labels = [f"{high:.4g}", f"{low:.4g}"]
    margin = max(map(len, labels)) + 1
    columns = max(4, width - margin)
    dots = _dots(known, low, high, columns * 2, height * 4)
    rows = _braille(dots) if has_braille else _stars(dots)
    left = [labels[0], *[""] * (height - 2), labels[1]] if height > 1 else labels[:1]
    first, last = f"{known[0, 0]:g}", f"{known[-1, 0]:g}"
    below = f"{first}{last:>{max(1, columns - len(first))}}" if len(known) > 1 else first
    body = [f"{label:>{margin - 1}} {row}" for label, row in zip(left, rows, strict=True)]
    return [*body, f"{'':{margin}}{below}"]


def _dots(known: NDArray[np.float64], low: float, high: float, columns: int, rows: int) -> NDArray[np.bool_]:
    """Which dots are on, [rows, columns]: between neighbours a line, and where many share a column all they span."""
    first, last = known[0, 0], known[-1, 0]
    places = np.zeros(len(known)) if last == first else (known[:, 0] - first) / (last - first) * (columns - 1)
    heights = np.full(len(known), 0.5) if high == low else (known[:, 1] - low) / (high - low)
    at = np.round((1 - heights) * (rows - 1)).astype(int)
    between = np.arange(int(places[-1]) + 1)
    line = np.round(np.interp(between, places, at)).astype(int)
    dots = np.zeros((rows, columns), dtype=np.bool_)
    for column, (here, there) in enumerate(zip(line, np.append(line[1:], line[-1]), strict=True)):
        dots[min(here, there) : max(here, there) + 1, column] = True
    for column, row in zip(np.round(places).astype(int), at, strict=True):
        dots[row, column] = True
    return dots


def _braille(dots: NDArray[np.bool_]) -> list[str]:
    rows, columns = dots.shape
    cells = dots.reshape(rows // 4, 4, columns // 2, 2).transpose(0, 2, 1, 3)
    codes = (cells * _BITS).sum(axis=(2, 3)) + _EMPTY
    return ["".join(map(chr, row)) for row in codes.tolist()]


def _stars(dots: NDArray[np.bool_]) -> list[str]:
    rows, columns = dots.shape
    cells = dots.reshape(rows // 4, 4, columns // 2, 2).sum(axis=(1, 3))
    return ["".join("*" if cell else " " for cell in row) for row in cells.tolist()]
