"""Display of a run: live bars on a terminal, plain lines in a file, or nothing.

``advance`` is called at every step and costs well under a microsecond unless drawing is due.
"""

from __future__ import annotations

import contextlib
import html
import os
import re
import sys
import textwrap
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO, cast

from paceline.parsing.plain_text import printable
from paceline.parsing.units import format_count, format_metric, format_seconds, metric_title
from paceline.plan.epochs import Epochs
from paceline.records.reader import NO_METRICS

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live
    from rich.progress import Progress

MAX_WIDTH = 100
BAR_VARIABLE, BAR = "PACELINE_BAR", "\x02"
"""In the environment: a cell shows the output, and what follows this character in a line is the HTML of its bar."""
_REFRESH_SECONDS = 0.25


class Display:
    """Display interface of the trainer. The base class shows nothing; it is used on every rank but the first."""

    def start(self, progress: RunProgress, title: str, lines: Sequence[str] = ()) -> None:
        """Start: show the title and the lines (the plan, in words), then ``progress``, which the display updates."""

    def advance(self, step: int) -> None:
        """Record that ``step`` steps are done; called at every step."""

    def status(self, text: str) -> None:
        """Show what delays the steps; called often, with an empty text when the delay is over."""

    def record(self, event: Mapping[str, Any]) -> None:
        """Receive an event, as the dictionary written to ``events.jsonl``."""

    def message(self, text: str) -> None:
        """Show a line."""

    def close(self) -> None:
        """End the display; closing twice, or without a start, is harmless."""


def choose_display(stream: TextIO | None, *, live: bool = True) -> Display:
    """Return live bars for a terminal that supports them or a notebook, else plain lines; none can fail a run.

    Args:
        stream: Where to show progress; None shows nothing.
        live: Whether bars may be drawn: a program that prints lines of its own would tear them.
    """
    if stream is None or getattr(stream, "closed", False):  # None: it was closed when Python started
        return Display()
    safe_stream = cast("TextIO", _SafeStream(stream))
    if live and stream.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        return LiveDisplay(safe_stream)
    show = bar_of_cell()
    if show is None and BAR_VARIABLE in os.environ:
        show = partial(_forward_bar, safe_stream)
    return PlainDisplay(safe_stream) if show is None else NotebookDisplay(safe_stream, show)


def bar_of_cell() -> Callable[[str], None] | None:
    """Return what shows HTML below a notebook's cell, each time in place of the last; None elsewhere."""
    ipython = sys.modules.get("IPython")
    if not hasattr(None if ipython is None else ipython.get_ipython(), "kernel"):
        return None
    from IPython.display import HTML, display  # only in a notebook, which has it

    handles = list[Any]()

    def show(page: str) -> None:
        if handles:
            handles[0].update(HTML(page))
        else:
            handles.append(display(HTML(page), display_id=True))

    return show


def _forward_bar(stream: TextIO, page: str) -> None:
    stream.write(f"{BAR}{page}\n")
    stream.flush()


class _SafeStream:
    """A stream that cannot end a run: after a failed write, nothing more is written to it.

    A terminal may be closed, a pipe's reader may exit (``| head``), or a log's disk may fill up. This is reported once
    on standard error.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_broken = False

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, call: Callable[[], object]) -> None:
        if self._is_broken:
            return
        try:
            call()
        except (OSError, ValueError) as error:  # a closed stream raises ValueError
            self._is_broken = True
            reason = getattr(error, "strerror", None) or str(error)
            # Live bars redirect standard error to show its text above them; this needs the underlying stream.
            errors = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
            with contextlib.suppress(OSError, ValueError):
                errors.write(f"paceline: progress is no longer shown ({reason}); the run continues.\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _StreamDisplay(Display, ABC):
    """Common base of plain lines and live bars, which draws the progress when due."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._progress: RunProgress | None = None
        self._due = 0.0

    def advance(self, step: int) -> None:
        """Draw the progress if it is due."""
        if self._progress is None:
            return
        self._progress.advance(step)
        if time.perf_counter() >= self._due:
            self._draw()

    def record(self, event: Mapping[str, Any]) -> None:
        """Store a step's values; show other events."""
        text = describe(event) if self._progress is None else self._progress.handle(event)
        if text is not None:
            self.message(text)
            self._after_shown(event)

    def _after_shown(self, event: Mapping[str, Any]) -> None:
        """Record that an event was shown."""

    @abstractmethod
    def _draw(self) -> None:
        """Show the progress."""


class PlainDisplay(_StreamDisplay):
    """One line per interval and per evaluation, for log files and pipes.

    Args:
        stream: Receives the lines.
        interval_seconds: Minimum time between two progress lines.
    """

    def __init__(self, stream: TextIO, *, interval_seconds: float = 10.0) -> None:
        super().__init__(stream)
        self._interval = interval_seconds
        self._due = float("inf")

    def start(self, progress: RunProgress, title: str, lines: Sequence[str] = ()) -> None:
        """Show title and lines."""
        self._progress = progress
        for text in (title, *lines):
            self.message(text)

    def status(self, text: str) -> None:
        """Show a line if one is due."""
        if text and time.perf_counter() >= self._due:
            self.message(text)

    def message(self, text: str) -> None:
        """Show a line, wrapped if it is wide; the next progress line is due an interval later."""
        lines = textwrap.wrap(
            _encodable(text, self._stream),
            MAX_WIDTH,
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        self._stream.write("\n".join(lines) + "\n")
        self._stream.flush()
        self._due = time.perf_counter() + self._interval

    def _after_shown(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "evaluation" and self._progress is not None:
            self._progress.record = {}  # shown again at a later step, it would mislead

    def _draw(self) -> None:
        assert self._progress is not None
        self.message(self._progress.line)


class NotebookDisplay(PlainDisplay):
    """A bar below a notebook's cell, redrawn in place, among plain lines for events.

    Args:
        stream: Receives the lines.
        show: Shows HTML in place of the last.
    """

    def __init__(self, stream: TextIO, show: Callable[[str], None]) -> None:
        super().__init__(stream)
        self._show = show
        self._status = ""

    def start(self, progress: RunProgress, title: str, lines: Sequence[str] = ()) -> None:
        """Show title and lines, and the bar below them."""
        super().start(progress, title, lines)
        self._draw()
        self._due = 0.0

    def status(self, text: str) -> None:
        """Show the text next to the bar; redraw if due, or when it is over."""
        self._status = text
        if not text or time.perf_counter() >= self._due:
            self._draw()

    def message(self, text: str) -> None:
        """Show a line."""
        super().message(text)
        self._due = 0.0

    def close(self) -> None:
        """Draw the final state and leave it."""
        self._draw()

    def _draw(self) -> None:
        if self._progress is not None:
            self._show(self._html())
        self._due = time.perf_counter() + _REFRESH_SECONDS

    def _html(self) -> str:
        progress = self._progress
        assert progress is not None
        said = self._status or f"epoch {progress.epoch}/{progress.epochs}  {progress.figures}  {progress.time_left}"
        done = f'<progress value="{progress.step}" max="{progress.total_steps}"></progress>'
        return f"{done} {progress.step}/{progress.total_steps} <code>{html.escape(said)}</code>"


class LiveDisplay(_StreamDisplay):
    """Bars for epoch and run with the latest values, redrawn in place; events become lines above them.

    They are drawn in the trainer's own calls, at most four times a second, never from a thread.

    Args:
        stream: A terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        from rich.console import Console  # it is slow to import

        self._console = Console(file=stream, highlight=False)
        self._bars: Progress | None = None
        self._live: Live | None = None
        self._status = ""

    def start(self, progress: RunProgress, title: str, lines: Sequence[str] = ()) -> None:
        """Show title and lines, and draw the bars below them."""
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.text import Text

        self._progress = progress
        self._console.print(Text(_encodable(title, self._stream), style="bold"))
        for text in lines:
            self.message(text)
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[left]}", markup=False),
            auto_refresh=False,
            console=self._console,
        )
        for name in ("epoch", "step"):
            self._bars.add_task(name, total=None, left="")
        self._live = Live(self._render(), console=self._console, auto_refresh=False)
        self._live.start(refresh=True)

    def status(self, text: str) -> None:
        """Show the text instead of the values; redraw if due, or when it is over."""
        self._status = text
        if not text or time.perf_counter() >= self._due:
            self._draw()

    def message(self, text: str) -> None:
        """Print a permanent line above the bars."""
        from rich.text import Text

        if self._live is not None:
            self._live.update(self._render())  # printing redraws the bars, so update them first
        self._console.print(Text(_encodable(text, self._stream)))

    def close(self) -> None:
        """Draw the final state and leave it on the terminal."""
        if self._live is not None:
            self._draw()
            self._live.stop()
            self._live = None

    def _draw(self) -> None:
        """Redraw now."""
        if self._live is not None:
            self._live.update(self._render(), refresh=True)
        self._due = time.perf_counter() + _REFRESH_SECONDS

    def _render(self) -> Group:
        """Update the bars and the values below them."""
        from rich.console import Group
        from rich.text import Text

        progress, bars = self._progress, self._bars
        assert progress is not None
        assert bars is not None
        epoch, run = bars.task_ids
        bars.update(
            epoch,
            description=f"epoch {progress.epoch}/{progress.epochs}",
            completed=progress.step_in_epoch,
            total=progress.steps_in_epoch,
        )
        bars.update(run, completed=progress.step, total=progress.total_steps, left=progress.time_left)
        return Group(bars.get_renderable(), Text(_encodable(self._status or progress.figures, self._stream)))


def _encodable(text: str, stream: TextIO) -> str:
    """Return the text with characters escaped that the stream cannot encode, or that a terminal would interpret."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return printable(text).encode(encoding, "backslashreplace").decode(encoding)


_ACCURACY = re.compile(r"^top(\d+)_accuracy$")
_MIN_SHOWN_FRACTION = 0.05


@dataclass
class RunProgress:
    """The run's progress, its last log record, and the time left.

    Attributes:
        total_steps: Steps of the whole run.
        step: Steps done.
        epoch_plan: How its epochs are divided into steps.
        unit: The name of samples: ``images``.
        record: The last step event.
        headline: The metric that an evaluation's line shows next to the loss.
        has_ema: Whether each evaluation scores two sets of weights, with the moving average last.
    """

    total_steps: int
    step: int
    epoch_plan: Epochs
    unit: str
    record: Mapping[str, Any] = field(default_factory=dict)
    headline: str = "loss"
    has_ema: bool = False
    _pace_start: tuple[int, float] | None = None
    _model: Mapping[str, Any] | None = None
    _expected_end: float | None = None

    def handle(self, event: Mapping[str, Any]) -> str | None:
        """Process an event; return the line to show for it, or None."""
        match event["event"]:
            case "step":
                self.record = event
                return None
            case "evaluation" if self.has_ema and event["weights"] == "model":
                self._model = event
                return None
            case "evaluation":
                model, self._model = self._model or event, None
                return self._evaluation(model, {} if model is event else event)
            case "measurement" if "expected_seconds" in event:
                self._expected_end = time.perf_counter() + event["expected_seconds"]
        return describe(event)

    def advance(self, step: int) -> None:
        """Record that a step is done. The pace is measured from the first one, which is slower than all others."""
        self.step = step
        if self._pace_start is None:
            self._pace_start = (step, time.perf_counter())

    def _evaluation(self, model: Mapping[str, Any], ema: Mapping[str, Any]) -> str:
        """Return an evaluation in one line: ``epoch 2/9  loss 0.41 (held-out 0.31)  top-1 91.2 % (ema 93.1 %)``."""
        position = model.get("position", model["step"])
        epoch = self.epoch_plan.locate(max(position - 1, 0))[0]
        is_epoch_end = position == self.epoch_plan.first_step(epoch + 1)
        parts = [f"epoch {epoch + 1}/{self.epochs}" + ("" if is_epoch_end else f"  step {model['step']}")]
        split, scored, averaged = _split(model), dict(_finite(model)), dict(_finite(ema))
        if "loss" in scored:
            loss = format_metric("loss", scored["loss"])
            if self.headline == "loss" and "loss" in averaged:
                loss += f", ema {format_metric('loss', averaged['loss'])}"
            trained = self.record.get("loss")
            parts.append(f"{split} loss {loss}" if trained is None else f"loss {trained:.4g} ({split} {loss})")
        metrics = [name for name in scored if name != "loss"]
        if name := self.headline if self.headline in metrics else "".join(metrics[:1]):
            average = f" (ema {format_metric(name, averaged[name])})" if name in averaged else ""
            parts.append(f"{_title(name)} {format_metric(name, scored[name])}{average}")
        if not scored:
            parts.append(f"{split}: no finite figure")
        speed = self.record.get("throughput_samples_per_second")
        pace = [] if speed is None else [f"{format_count(speed)} {self.unit}/s"]
        time_left = [self.time_left] if self.time_left else []
        line = "  ".join([*parts, *pace, *time_left])
        return line if len(line) <= MAX_WIDTH else "  ".join([*parts, *time_left])

    @property
    def epochs(self) -> int:
        """Epochs of the whole run, including a partial last one."""
        return self.epoch_plan.locate(max(self.total_steps - 1, 0))[0] + 1

    @property
    def epoch(self) -> int:
        """Epoch of the last step, counted from 1."""
        return self.epoch_plan.locate(max(self.step - 1, 0))[0] + 1

    @property
    def step_in_epoch(self) -> int:
        """Steps done in that epoch."""
        return self.step - self.epoch_plan.first_step(self.epoch - 1)

    @property
    def steps_in_epoch(self) -> int:
        """Steps of that epoch: the run's last epoch may be cut short."""
        first = self.epoch_plan.first_step(self.epoch - 1)
        return min(self.epoch_plan.first_step(self.epoch), self.total_steps) - first

    @property
    def seconds_left(self) -> float | None:
        """Time to the end at the current pace, with evaluations and saves; before there is one, the forecast."""
        if self._pace_start is None or not self._pace_start[0] < self.step < self.total_steps:
            if self._expected_end is None or self.step >= self.total_steps:
                return None
            return max(0.0, self._expected_end - time.perf_counter())
        first_step, start = self._pace_start
        seconds_per_step = (time.perf_counter() - start) / (self.step - first_step)
        return seconds_per_step * (self.total_steps - self.step)

    @property
    def time_left(self) -> str:
        """Return the time left in words, or an empty string if unknown."""
        seconds = self.seconds_left
        return "" if seconds is None else f"{format_seconds(seconds)} left"

    @property
    def figures(self) -> str:
        """Return the last log record in words; unknown values are left out."""
        return figures(self.record, self.unit)

    @property
    def line(self) -> str:
        """Return the complete progress in one line."""
        position = f"epoch {self.epoch}/{self.epochs}  step {self.step}/{self.total_steps}"
        return "  ".join(part for part in (position, self.figures, self.time_left) if part)


def figures(record: Mapping[str, Any], unit: str) -> str:
    """Return a log record in words; unknown values are left out."""
    formats: dict[str, Callable[[float], str]] = {
        "loss": lambda loss: f"training loss {loss:.4g}",
        "lr": lambda lr: f"lr {lr:.3g}",
        "throughput_samples_per_second": lambda rate: f"{format_count(rate)} {unit}/s",
        "throughput_tokens_per_second": lambda rate: f"{format_count(rate)} tokens/s",
        "mfu": lambda share: f"MFU {share:.1%}",
        "data_wait_fraction": lambda share: f"data wait {share:.0%}",
    }
    parts = [text(record[key]) for key, text in formats.items() if record.get(key) is not None]
    logged: Sequence[str] | None = record.get("logged")  # by a loop of your own, which may log no loss
    if logged is None and "loss" in record and record["loss"] is None:
        parts.insert(0, "training loss not finite")
    parts[:0] = [f"{name} {record[name]:.4g}" for name in logged or () if record.get(name) is not None]
    waits, step = record.get("communication_seconds"), record.get("step_seconds")
    if waits and step and waits >= _MIN_SHOWN_FRACTION * step:
        parts.append(f"communication {waits / step:.0%}")
    return "  ".join(parts)


def describe(event: Mapping[str, Any]) -> str | None:
    """Return the line to show for an event, or None if there is nothing to show."""
    match event["event"]:
        case "evaluation":
            return _evaluation(event)
        case "incident":
            return f"step {event['step']}  {event['incident'].replace('_', ' ')}: {event['message']}"
        case "measurement":
            measured = f" (measured in {event['seconds']:.1f} s)" if event["seconds"] else ""
            return f"{event['message']}{measured}"
        case "resume":
            return f"resumed from {event['checkpoint']}"
        case "stop":
            return f"step {event['step']}  stopped: {event['reason']}"
        case _:
            return None  # steps appear as progress; saving, starting and finishing need no line


def _evaluation(event: Mapping[str, Any]) -> str:
    """Describe an evaluation: ``epoch 2  step 90  held-out (ema): loss 0.31  top-1 91.23 %``."""
    metrics = [f"{_title(name)} {format_metric(name, value)}" for name, value in _finite(event)]
    position = f"epoch {event['epoch']}  step {event['step']}" if "epoch" in event else f"step {event['step']}"
    return f"{position}  {_split(event)} ({event['weights']}): {'  '.join(metrics) or 'no finite figure'}"


def _split(event: Mapping[str, Any]) -> str:
    """Return what was scored, in words; a loop of your own gives other names."""
    return "held-out" if event["split"] == "validation" else str(event["split"])


def _finite(event: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Return the metrics of an evaluation that are finite."""
    for name, value in event.items():
        if name not in NO_METRICS and isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value


def _title(metric: str) -> str:
    accuracy = _ACCURACY.match(metric)
    return f"top-{accuracy[1]}" if accuracy else metric_title(metric)
