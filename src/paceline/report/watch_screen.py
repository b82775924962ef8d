"""What does a person who watches a run see: one screen of figures and curves, or one line per record?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.report.text_chart import Points, draw_chart
from paceline.report.watch import State, WatchedRun
from paceline.telemetry.progress import describe, figures
from paceline.units import format_metric, format_seconds, metric_title, metric_unit

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
        f"{run.name}: {_state(run)}, step {run.step}"
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


def _state(run: WatchedRun) -> str:
    return _WORDS.get(run.state, run.state)


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
    title.append(f"  {_state(run)}", style=_STYLES.get(run.state, "cyan"))
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
    beside: tuple[str, Points] = (", ".join(filter(None, (metric_title(name), metric_unit(name)))), scored)
    beside = (f"{beside[0]} (evaluations)", scored)
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
