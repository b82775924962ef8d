"""Training section: curves over steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from paceline.pages.charts import DASHES, SERIES
from paceline.pages.page import Block, Chart, Table, Text
from paceline.parsing.units import format_metric, metric_title, metric_unit
from paceline.reports.html.runs import Event, RunRecord

# The other keys of a step record are shown elsewhere or are not training metrics.
_GRADIENT = {
    "grad_norm": ("Gradient norm", "L2 norm", "Of the recorded step, before clipping."),
    "grad_scale": ("Loss scale", "factor", "Keeps small fp16 gradients from vanishing."),
    "noise_scale": ("Gradient noise scale", "", "Batches that count for much less than this waste few samples."),
}


def training(runs: Sequence[RunRecord]) -> Iterator[Block]:
    """Return the section's blocks."""
    if not any(run.of("step") for run in runs):
        yield Text("No step record was written yet: `telemetry.log_every` sets their interval.", kind="warning")
    elif len(runs) == 1 and (runs[0].of("resume") or runs[0].of("incident")):
        yield Text(
            "A dashed vertical line marks a step from which the run was resumed, a dotted one an incident; the "
            "section Events names them."
        )
    title = "Training loss" if len(runs) > 1 else "Loss"
    weighted = " or ".join(dict.fromkeys(run.weight_unit for run in runs))
    unit = "nats per sample" if all(run.headline == "top1_accuracy" for run in runs) else f"mean over {weighted}"
    lines, description = of_runs(runs, "loss", "training"), "In training, mean since the previous record."
    if len(runs) == 1:
        lines += _evaluated(runs, "loss")
        description = (
            "Training: mean since the previous record, with label smoothing if there is any. Held-out: without."
        )
    yield from curves(title, unit, lines, runs, description)
    for metric in dict.fromkeys(metric for run in runs for metric in run.metrics):
        if metric == "loss" and len(runs) == 1:
            continue
        unit = metric_unit(metric)
        title = "held-out loss" if metric == "loss" else metric_title(metric)
        name = title if title[1:2].isupper() else title[:1].upper() + title[1:]
        # Without it, the axis of a constant 0 begins at -1, and that of a small constant shows 0.
        axis = {"rangemode": "nonnegative"} if unit else {}
        yield from curves(name, unit, _evaluated(runs, metric), runs, "Of held-out samples, each counted once.", **axis)
    lines = of_runs(runs, "lr", "learning rate")
    yield from curves("Learning rate", "learning rate", lines, runs, rangemode="tozero")
    for key, (title, unit, description) in _GRADIENT.items():
        lines = of_runs(runs, key, title.lower())
        # A constant loss scale of 1 means that there is no scaler.
        if key == "grad_scale" and all(value in (1, None) for line in lines for value in line.y):
            continue
        yield from curves(title, unit or weighted, lines, runs, description)
    yield from _best(runs)


def _evaluated(runs: Sequence[RunRecord], metric: str) -> list[ChartLine]:
    """Plot one line per set of weights and, for several runs, per run.

    For one run, a set of weights looks the same in all charts; the first colour is for training. For several runs, each
    run keeps its colour.
    """
    lines = []
    for at, run in enumerate(runs):
        for number, (weights, events) in enumerate(run.evaluations.items()):
            name = f"held-out, {weights}" if len(runs) == 1 else f"{run.name}, {weights}"
            style = 1 + number if len(runs) == 1 else at + 3 * SERIES * number
            line = of_events(name, events, metric, style)
            lines += [line] if line is not None else []
    return lines


def _shown(metric: str, value: float) -> str:
    """Format a value as the other commands do; the caption of the table has its unit."""
    return format_metric(metric, value).removesuffix(" %")


def _best(runs: Sequence[RunRecord]) -> Iterator[Block]:
    rows = []
    for run, weights, events in ((each, *found) for each in runs for found in each.evaluations.items()):
        for metric in run.metrics:
            evaluated = [event for event in events if event.get(metric) is not None]
            if not evaluated:
                continue
            is_higher = run.higher_is_better(metric)
            best: tuple[object, ...] = ("", "")  # if the records do not say whether higher is better
            if is_higher is not None:
                event = (max if is_higher else min)(evaluated, key=itemgetter(metric))
                best = _shown(metric, event[metric]), event["step"]
            name = [run.name] * (len(runs) > 1)
            rows.append((*name, f"{metric_title(metric)}, {weights}", _shown(metric, evaluated[-1][metric]), *best))
    if rows:
        columns = (*["run"] * (len(runs) > 1), "metric, weights", "last", "best", "best after step")
        is_usual = all(run.headline == "top1_accuracy" for run in runs)
        units = (
            "accuracies in %, losses in nats" if is_usual else "accuracies in %, everything else as the task reports it"
        )
        yield Table(columns=columns, rows=rows, caption=f"Evaluations, {units}")
    else:
        over = all(run.status in ("completed", "failed") for run in runs)
        state = "was not evaluated" if over else "was not evaluated yet"
        yield Text(f"The run {state}, or has no held-out samples: `evaluate.every` sets when it is.")


# Over all lines of a chart.
_MOST_POINTS = 4000
_FEW_POINTS, _MANY_POINTS = 40, 500
_MOST_MARKS = 40
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star")


@dataclass(frozen=True, kw_only=True)
class ChartLine:
    """A curve.

    Attributes:
        name: Its label.
        x: Steps.
        y: Values; None if missing.
        style: Index of colour, dash and symbol.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    style: int


def of_events(name: str, events: Iterable[Event], key: str, style: int) -> ChartLine | None:
    """Return the curve of one key of the given events; None without numbers."""
    points = [(event["step"], event[key]) for event in events if key in event]
    if all(value is None for _, value in points):
        return None
    return ChartLine(name=name, x=[step for step, _ in points], y=[value for _, value in points], style=style)


def of_runs(runs: Sequence[RunRecord], key: str, name: str) -> list[ChartLine]:
    """Return one curve of a step record key per run that has it, labelled by run if there are several."""
    several = len(runs) > 1
    lines = (of_events(run.name if several else name, run.of("step"), key, style) for style, run in enumerate(runs))
    return [line for line in lines if line is not None]


def curves(
    title: str, unit: str, lines: Sequence[ChartLine], runs: Sequence[RunRecord], description: str = "", **axis: Any
) -> Iterator[Chart]:
    """Plot curves over steps; None without curves."""
    if not lines:
        return
    most_points = max(60, _MOST_POINTS // len(lines))
    layout = {
        "xaxis": {"title": "step", "rangemode": "tozero"},
        "yaxis": {"title": unit, **axis},
        "shapes": list(_marks(runs)),
        "showlegend": len(lines) > 1,
        "hovermode": "x unified" if len(lines) < SERIES else "closest",
    }
    traces = []
    for line in lines:
        indices, style = downsample(line.y, most_points), series_style(line.style)
        if len(indices) > _MANY_POINTS:
            style["line"]["width"] = 1.2
        mode = "lines+markers" if len(indices) <= _FEW_POINTS else "lines"
        x, y = ([values[at] for at in indices] for values in (line.x, line.y))
        traces.append({"type": "scatter", "mode": mode, "name": line.name, "x": x, "y": y, **style})
    count = sum(len(line.x) for line in lines)
    if sum(len(trace["x"]) for trace in traces) < count:
        description += (
            f" Of {count:,} points, only the lowest, highest, first and last of each interval are drawn; events.jsonl "
            "has all."
        )
    yield Chart(title=title, traces=traces, layout=layout, description=description.strip())


def series_style(style: int) -> dict[str, Any]:
    """Return a series' line and markers; beyond eight, colours repeat with other dashes."""
    colour = f"var(--series-{style % SERIES + 1})"
    dash = DASHES[(style % SERIES + style // SERIES) % len(DASHES)]
    return {
        "line": {"color": colour, "dash": dash, "width": 2},
        "marker": {"color": colour, "symbol": _SYMBOLS[style % len(_SYMBOLS)], "size": 6},
    }


def _marks(runs: Sequence[RunRecord]) -> Iterator[Mapping[str, Any]]:
    """Mark resumes with dashed vertical lines and problems with dotted ones; only for a single run."""
    if len(runs) != 1:
        return
    for kind, dash, colour in (("resume", "dash", "var(--muted)"), ("incident", "dot", "var(--bad)")):
        steps = sorted({event["step"] for event in runs[0].of(kind)})
        for step in steps[:: -(-len(steps) // _MOST_MARKS) or 1]:
            position = {"xref": "x", "yref": "paper", "x0": step, "x1": step, "y0": 0, "y1": 1}
            yield {"type": "line", **position, "line": {"color": colour, "width": 1.5, "dash": dash}}


def downsample(values: Sequence[float | None], most_points: int) -> list[int]:
    """Return the indices of points that preserve a curve's shape: minima, maxima and ends of each stretch, and gaps.

    Selects points of the curve; nothing is averaged.

    Args:
        values: The curve; None at gaps.
        most_points: Approximate number of points; at least eight.
    """
    count = len(values)
    if count <= most_points:
        return list(range(count))
    numbers = np.array([math.nan if each is None else each for each in values], dtype=np.float64)
    indices = {0, count - 1}
    # A stretch yields at most five points, usually four.
    for interval in np.array_split(np.arange(count), max(2, most_points // 4)):
        is_known = np.isfinite(numbers[interval])
        known, gaps = interval[is_known], interval[~is_known]
        indices.update(gaps[:1].tolist())
        if known.size:
            extremes = (known[numbers[known].argmin()], known[numbers[known].argmax()])
            indices.update(int(each) for each in (known[0], known[-1], *extremes))
    return sorted(indices)
