"""Progress of a run, read from its directory during training and drawn in a terminal.

The events file is reopened for each read, so that a network file system shows other hosts' writes.
"""

from __future__ import annotations

import contextlib
import math
import re
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.errors import RunDirectoryError
from paceline.learning.judge import Judgement, judge_run
from paceline.parsing.units import counted, format_metric, format_seconds, metric_title, metric_unit
from paceline.records.events import for_display, parse_line
from paceline.records.reader import read_environment, read_plan, read_recipe
from paceline.records.run_directory import RunDirectory, existing_run, file_error, refuse_special_file
from paceline.reports.html.runs import Event, RunHistory
from paceline.telemetry.display import describe, figures
from paceline.telemetry.meter import PHASES

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

Points = Sequence[tuple[float, float]]
State = Literal["starting", "running", "completed", "stopped", "failed", "gone"]

# Allows for a launcher that restarts a run, and for a slow step.
GONE_SECONDS = 60.0
# Records averaged for phase shares and pace.
_RECENT_RECORDS = 20
_PACE_RECORDS = 200


class WatchedRun(RunHistory):
    """One run, polled periodically.

    Args:
        run: Its directory.

    Raises:
        RunDirectoryError: If it does not exist or its files are damaged; also raised later.
    """

    def __init__(self, run: Path) -> None:
        self.name = str(run)
        self.directory: RunDirectory = existing_run(run)
        self.events: list[Event] = []
        self.plan: Mapping[str, Any] = {}
        self.finish: Event = {}
        self._since_launch = 0
        self._follower = EventFollower(self.directory.events)
        self._quiet_since = time.monotonic()
        self._is_first_look = True

    def look(self) -> list[dict[str, Any]]:
        """Read new events; returns the run."""
        was_truncated, events = self._follower.read()
        if was_truncated:
            self.events, self.finish, self._since_launch = [], {}, 0
            self._by_kind.clear()
        for event in events:
            if event["event"] == "start":
                self.finish, self._since_launch = {}, len(self.of("step"))
            elif event["event"] == "finish":
                self.finish = event
            self._by_kind.setdefault(event["event"], []).append(event)
        self.events += events
        if events or was_truncated:
            self._quiet_since = time.monotonic()
        if not self.plan or any(event["event"] == "start" for event in events):
            self.plan = {}
            with contextlib.suppress(RunDirectoryError):  # being written, or written by a version without it
                self.plan = read_plan(self.directory)
        if self._is_first_look:
            # A run that has been silent for long is not expected to continue.
            self._quiet_since -= self.seconds_since_last or 0.0
            self._is_first_look = False
        return events

    @property
    def state(self) -> State:
        """Its state; ``gone`` if it ended without a record, for example after a kill."""
        if self.finish:
            status: State = self.finish["status"]
            return status if status in ("completed", "stopped") else "failed"
        is_quiet = time.monotonic() - self._quiet_since > GONE_SECONDS
        if is_quiet and is_being_trained(self.directory) is False:
            return "gone"
        return "running" if self.start else "starting"

    @property
    def sample_name(self) -> str:
        """Name of its samples."""
        return str(self.plan.get("sample_name", "samples"))

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.state not in ("starting", "running")

    @property
    def epochs(self) -> int | None:
        """Epochs of the whole run, including a last partial one."""
        total = self.plan.get("total_epochs")
        return math.ceil(total) if isinstance(total, int | float) and abs(total) < 1e15 else None

    @property
    def record(self) -> Event:
        """Last step record; empty before the first."""
        return self.of("step")[-1] if self.of("step") else {}

    @property
    def resumes(self) -> int:
        """Number of resumes."""
        return int(self.of("resume")[-1]["resumes"]) if self.of("resume") else 0

    @property
    def seconds_left(self) -> float | None:
        """Estimated time left at the recent pace of this launch, including evaluations and saves."""
        recent = self.of("step")[self._since_launch :][-_PACE_RECORDS:]
        total = self.total_steps
        if self.is_over or total is None or len(recent) < 2 or recent[-1]["step"] == recent[0]["step"]:
            return None
        seconds = (recent[-1]["time"] - recent[0]["time"]) / (recent[-1]["step"] - recent[0]["step"])
        remaining: float = seconds * (total - recent[-1]["step"]) - (time.time() - recent[-1]["time"])
        return max(0.0, remaining)

    @property
    def seconds_since_last(self) -> float | None:
        """Seconds since the last event; None before the first. Never negative, since hosts' clocks differ."""
        last_time = self.events[-1].get("time") if self.events else None
        return None if last_time is None else max(0.0, time.time() - last_time)

    def curve(self, key: str, *, evaluations: bool = False) -> list[tuple[float, float]]:
        """Return (step, value) of all records with a number for a key; evaluations prefer the averaged weights."""
        source = self.of("step")
        if evaluations:
            weights = "ema" if any(each["weights"] == "ema" for each in self.of("evaluation")) else "model"
            source = [each for each in self.of("evaluation") if each["weights"] == weights]
        return [(each["step"], each[key]) for each in source if isinstance(each.get(key), int | float)]

    @property
    def judgement(self) -> Judgement:
        """Whether it learns, and the likely cause if not."""
        recipe: Mapping[str, Any] = {}
        with contextlib.suppress(RunDirectoryError):
            if self.is_over:
                return judge_run(self.directory)  # with the warning of its summary, as the other commands do
            recipe = read_recipe(self.directory)
        return self.judged(self.directory, recipe)

    def phases(self) -> dict[str, float]:
        """Phase shares of step time, over the last records."""
        recent = self.of("step")[-_RECENT_RECORDS:]
        step_seconds = sum(each.get("step_seconds") or 0.0 for each in recent)
        if not step_seconds:
            return {}
        sums = {phase: sum(each.get(f"{phase}_seconds") or 0.0 for each in recent) for phase in PHASES}
        return {phase: seconds / step_seconds for phase, seconds in sums.items() if seconds}

    def to_json(self) -> dict[str, Any]:
        """Return its current state, for programs."""
        saved = [each["checkpoint"] for each in self.of("checkpoint")]
        return {
            "run_dir": self.name,
            "status": self.state,
            "step": self.step,
            "total_steps": self.total_steps,
            "epoch": self.record.get("epoch"),
            "total_epochs": self.plan.get("total_epochs"),
            "world_size": self.start.get("world_size"),
            "resumes": self.resumes,
            "seconds_left": self.seconds_left,
            "seconds_since_last_event": self.seconds_since_last,
            "last_step": self.record,
            "last_evaluations": {each["weights"]: each for each in self.of("evaluation")},
            "phases": self.phases(),
            "incidents": self.of("incident"),
            "learning": str(self.judgement),
            # The run removes old files.
            "checkpoints": [name for name in saved if (self.directory.checkpoints / name).is_dir()],
            "message": self.finish.get("message"),
        }


class EventFollower:
    """Follows a growing events file; incomplete lines are read the next time.

    Args:
        path: The file, which need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._number = 0
        self._last = b""

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return whether the file was truncated since the last read, and the new events: after truncation, all of them.

        Raises:
            RunDirectoryError: If the file cannot be read, or a line is not an event.
        """
        refuse_special_file(self._path)
        try:
            with self._path.open("rb") as file:
                file.seek(max(0, self._offset - len(self._last)))
                data = file.read()
                was_truncated = not data.startswith(self._last)
                if was_truncated:
                    self._offset, self._number, self._last = 0, 0, b""
                    file.seek(0)
                    data = file.read()
        except FileNotFoundError:
            was_truncated = self._offset > 0
            self._offset, self._number, self._last = 0, 0, b""
            return was_truncated, []
        except OSError as error:
            raise file_error("read", self._path, error) from error
        return was_truncated, self._events(data[len(self._last) :])

    def _events(self, data: bytes) -> list[dict[str, Any]]:
        events = []
        for line in data.splitlines(keepends=True):
            # A network file system may show a line's space before its text.
            if not line.endswith(b"\n") or b"\0" in line:
                break
            self._number += 1
            event = parse_line(line, self._path, self._number, is_last=False)
            assert event is not None  # only unterminated lines are
            events.append(for_display(event, self._path))
            self._offset += len(line)
            self._last = line
        return events


def is_being_trained(directory: RunDirectory) -> bool | None:
    """Whether a process is training in a run directory now; None if that cannot be determined from this host.

    Looks the lock up without taking it, so that a run that starts at the same moment finds it free.
    """
    if read_environment(directory).get("host") != socket.gethostname():
        return None
    try:
        inode = (directory.root / ".lock").stat().st_ino
        # It identifies files as MAJOR:MINOR:INODE.
        return re.search(rf"\S+:\S+:{inode}\s", Path("/proc/locks").read_text(encoding="ascii")) is not None
    except OSError:
        return None


_STYLES: Mapping[State, str] = {"completed": "green", "failed": "bold red", "gone": "bold red", "stopped": "yellow"}
_STATE_TEXTS: Mapping[State, str] = {"gone": "ended without a record: no process is training"}
_MOST_EVALUATIONS = 4
_MOST_METRICS = 6
_MOST_INCIDENTS = 3
_WIDE = 100
# Rows that are not curves.
_OTHER_ROWS = 18
_LEAST_CHART_ROWS, _MOST_CHART_ROWS = 3, 14


def line_of(event: Event, run: WatchedRun) -> str | None:
    """Format an event as one line, as in the log of ``paceline train``; None for events without a line."""
    if event["event"] == "finish":
        message = f": {event['message']}" if event.get("message") else ""
        return f"step {event['step']}  {event['status']}{message}"
    if event["event"] != "step":
        return describe(event)
    progress = f"epoch {event['epoch']}{_of(run.epochs)}  step {event['step']}{_of(run.total_steps)}"
    return "  ".join(part for part in (progress, figures(event, run.sample_name)) if part)


def _of(total: int | None) -> str:
    return f"/{total}" if total else ""


def exit_line(run: WatchedRun) -> str:
    """Describe how a run ended, and in a second line why it did not learn, if so."""
    message = run.finish.get("message")
    progress = f"step {run.step}{_of(run.total_steps)}"
    ending = f"{run.name}: {_STATE_TEXTS.get(run.state, run.state)}, {progress}{f': {message}' if message else ''}"
    return f"{ending}\n  {judgement}" if (judgement := run.judgement) else ending


def screen(run: WatchedRun, console: Console) -> RenderableType:
    """Render one run's details, at most as high as the terminal."""
    from rich.console import Group
    from rich.text import Text

    evaluations, saved = run.of("evaluation"), run.of("checkpoint")
    parts: list[RenderableType] = [_title(run), _bar(run, console.width)]
    if run.record:
        parts.append(Text(figures(run.record, run.sample_name)))
    parts.append(_charts(run, console))
    shares = sorted(run.phases().items(), key=lambda each: -each[1])
    if shares and (seconds := run.record.get("step_seconds")):
        phases = "  ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in shares if share >= 0.005)
        parts.append(Text(f"a step, {1e3 * seconds:.4g} ms: {phases}"))
    if evaluations:
        parts.append(_evaluations(run))
    parts += [Text(f"{describe(each)}", style="yellow") for each in run.of("incident")[-_MOST_INCIDENTS:]]
    if judgement := run.judgement:
        parts.append(Text(str(judgement), style="yellow"))
    if saved:
        parts.append(Text(f"checkpoints: {len(saved)} saved, the last is {saved[-1]['checkpoint']}", style="dim"))
    if run.directory.report.is_file():
        parts.append(Text(f"report: {run.directory.report}", style="dim"))
    if run.directory.tensorboard.is_dir():
        parts.append(Text(f"in a browser: tensorboard --logdir {run.directory.tensorboard}", style="dim"))
    return Group(*parts)


def table(runs: Sequence[WatchedRun]) -> Table:
    """Render several runs, one line each."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("run", "status", "epoch", "step", "loss", "evaluated", "samples/s", "data wait", "left", "incidents"):
        grid.add_column(name, overflow="fold" if name == "run" else "ellipsis", no_wrap=name != "run")
    for run in runs:
        cells = row(run)
        # Text, because brackets in a name would be parsed as markup.
        grid.add_row(Text(cells[0]), Text(cells[1], style=_STYLES.get(run.state, "")), *cells[2:])
    return grid


def row(run: WatchedRun) -> tuple[str, ...]:
    """Return the cells of one run."""
    record, name = run.record, run.headline if run.headline in run.metrics else "loss"
    evaluated = run.curve(name, evaluations=True)
    title = "top-1" if name == "top1_accuracy" else metric_title(name)
    left = run.seconds_left
    return (
        run.name,
        run.state,
        f"{record['epoch']}/{run.epochs or '?'}" if record else "",
        f"{run.step}/{run.total_steps or '?'}",
        _number(record.get("loss"), "{:.4g}"),
        f"{title} {format_metric(name, evaluated[-1][1])}" if evaluated else "",
        _number(record.get("throughput_samples_per_second"), "{:,.0f}"),
        _number(record.get("data_wait_fraction"), "{:.0%}"),
        "" if left is None else format_seconds(left),
        str(len(run.of("incident")) or ""),
    )


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _title(run: WatchedRun) -> Text:
    from rich.text import Text

    facts = [str(run.start.get("recipe", ""))]
    if ranks := run.start.get("world_size"):
        facts.append(counted(ranks, "process"))
    if run.resumes:
        facts.append(f"resumed {counted(run.resumes, 'time')}")
    since = run.seconds_since_last
    if since is not None and not run.is_over:
        facts.append(f"last update {format_seconds(since)} ago")
    title = Text(run.name, style="bold")
    title.append(f"  {_STATE_TEXTS.get(run.state, run.state)}", style=_STYLES.get(run.state, "cyan"))
    return title.append("  " + "  ".join(filter(None, facts)), style="not bold dim")


def _bar(run: WatchedRun, width: int) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    total, left = run.total_steps or 0, run.seconds_left
    epoch = f"epoch {run.record['epoch']}/{run.epochs or '?'}  " if run.record else ""
    grid = Table.grid(padding=(0, 1))
    grid.add_row(
        f"{epoch}step {run.step}/{total or '?'}",
        ProgressBar(total=total or 1, completed=run.step, width=max(10, min(50, width - 55))),
        f"{run.step / total:.0%}" if total else "",
        "" if left is None else f"{format_seconds(left)} left",
    )
    return grid


def _charts(run: WatchedRun, console: Console) -> RenderableType:
    """Render the training loss next to the headline metric; empty if the terminal has no Braille characters."""
    from rich.table import Table
    from rich.text import Text

    if not console.encoding.lower().startswith("utf"):
        return Text("")
    name = run.headline if run.headline in run.metrics else "loss"
    evaluated = run.curve(name, evaluations=True)
    second_chart = (f"{', '.join(filter(None, (metric_title(name), metric_unit(name))))} (evaluations)", evaluated)
    if not evaluated:
        second_chart = (f"{run.sample_name}/s", run.curve("throughput_samples_per_second"))
    is_wide = console.width >= _WIDE
    height = (console.height - _OTHER_ROWS) // (1 if is_wide else 2)
    height = min(_MOST_CHART_ROWS, max(_LEAST_CHART_ROWS, height))
    width = (console.width - 4) // 2 if is_wide else min(console.width, _WIDE) - 2
    charts = [
        Text(f"{title}\n", style="bold").append(
            "\n".join(draw_chart(points, width=width, height=height)), "not bold cyan"
        )
        for title, points in (("training loss", run.curve("loss")), second_chart)
    ]
    grid = Table.grid(padding=(0, 2))
    for cells in [charts] if is_wide else [[each] for each in charts]:
        grid.add_row(*cells)
    return grid


def _evaluations(run: WatchedRun) -> Table:
    from rich import box
    from rich.table import Table

    evaluations, headline = run.of("evaluation"), run.headline
    names = sorted(run.metrics, key=lambda name: (name != "loss", name != headline))[:_MOST_METRICS]
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("step", "weights", *names):
        grid.add_column(metric_title(name).replace(" accuracy", " %"), justify="right")
    scores = [each[headline] for each in evaluations if each.get(headline) is not None]
    best = (min if run.higher_is_better(headline) is False else max)(scores, default=None)
    for each in evaluations[-_MOST_EVALUATIONS:]:
        values = [_number(each.get(name), "{:.2f}" if metric_unit(name) else "{:.4g}") for name in names]
        is_best = best is not None and each.get(headline) == best
        grid.add_row(str(each["step"]), str(each["weights"]), *values, style="bold" if is_best else None)
    return grid


# Bits of a Braille character by the row and column of its dots.
_BITS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
_EMPTY = 0x2800


def draw_chart(points: Points, *, width: int, height: int) -> list[str]:
    """Draw a curve in Braille, with its maximum and minimum at the left and the first and last position below.

    Args:
        points: (place, value) in ascending order; NaN values are left out.
        width: Total columns.
        height: Rows of the curve, at least 2, without the row of positions.
    """
    finite = np.array([each for each in points if np.isfinite(each[1])], dtype=np.float64).reshape(-1, 2)
    if len(finite) == 0:
        return ["(nothing yet)"]
    low, high = float(finite[:, 1].min()), float(finite[:, 1].max())
    labels = [f"{high:.4g}", *[""] * (height - 2), f"{low:.4g}"]
    margin = max(map(len, labels)) + 1
    columns = max(4, width - margin)
    cells = _dots(finite, low, high, columns * 2, height * 4).reshape(height, 4, columns, 2).transpose(0, 2, 1, 3)
    codes = (cells * _BITS).sum(axis=(2, 3)) + _EMPTY
    first, last = f"{finite[0, 0]:g}", f"{finite[-1, 0]:g}"
    positions = f"{first}{last:>{max(1, columns - len(first))}}" if len(finite) > 1 else first
    body = [
        f"{label:>{margin - 1}} {''.join(map(chr, row))}" for label, row in zip(labels, codes.tolist(), strict=True)
    ]
    return [*body, f"{'':{margin}}{positions}"]


def _dots(finite: NDArray[np.float64], low: float, high: float, columns: int, rows: int) -> NDArray[np.bool_]:
    """Return the set dots, [rows, columns]: lines between neighbours; the full span of points in one column."""
    first, last = finite[0, 0], finite[-1, 0]
    columns_of = np.zeros(len(finite)) if last == first else (finite[:, 0] - first) / (last - first) * (columns - 1)
    heights = np.full(len(finite), 0.5) if high == low else (finite[:, 1] - low) / (high - low)
    rows_of = np.round((1 - heights) * (rows - 1)).astype(int)
    line = np.round(np.interp(np.arange(int(columns_of[-1]) + 1), columns_of, rows_of)).astype(int)
    dots = np.zeros((rows, columns), dtype=np.bool_)
    for column, (start, end) in enumerate(zip(line, np.append(line[1:], line[-1]), strict=True)):
        dots[min(start, end) : max(start, end) + 1, column] = True
    dots[rows_of, np.round(columns_of).astype(int)] = True
    return dots
