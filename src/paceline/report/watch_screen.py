"""What `paceline watch` shows: one screen of figures and curves, or one line per record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.report.watch import State, WatchedRun
from paceline.telemetry.progress import describe, figures
from paceline.units import format_metric, format_seconds, metric_title, metric_unit

Points = Sequence[tuple[float, float]]

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

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
