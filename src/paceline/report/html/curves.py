"""Curves of a report: one line for each run or set of weights over steps, with marks at resumes and incidents."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from paceline.pages.charts import SERIES
from paceline.pages.page import Chart
from paceline.report.html.runs import Event, RunRecord

# Of all lines of a chart together.
_MOST_POINTS = 4000
_FEW_POINTS, _MANY_POINTS = 40, 500
_MOST_MARKS = 40
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star")


@dataclass(frozen=True, kw_only=True)
class Line:
    """A curve.

    Attributes:
        name: What it is called.
        x: Steps.
        y: None where there is no number.
        style: Which colour, dash and symbol.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    style: int


def of_events(name: str, events: Iterable[Event], key: str, style: int) -> Line | None:
    """The curve of one key of some events; None where none of them has a number there."""
    found = [(event["step"], event[key]) for event in events if key in event]
    if all(value is None for _, value in found):
        return None
    return Line(name=name, x=[step for step, _ in found], y=[value for _, value in found], style=style)


def of_runs(runs: Sequence[RunRecord], kind: str, key: str, name: str) -> list[Line]:
    """The curve of one key for each run that has it: called by the run where there are several."""
    lines = (of_events(run.name if len(runs) > 1 else name, run.of(kind), key, style) for style, run in enumerate(runs))
    return [line for line in lines if line is not None]


def curves(
    title: str, unit: str, lines: Sequence[Line], runs: Sequence[RunRecord], description: str = "", **axis: Any
) -> Iterator[Chart]:
    """A chart of curves over steps, or none without one."""
    if not lines:
        return
    most = max(60, _MOST_POINTS // len(lines))
    layout = {
        "xaxis": {"title": "step", "rangemode": "tozero"},
        "yaxis": {"title": unit, **axis},
        "shapes": list(_marks(runs)),
        "showlegend": len(lines) > 1,
        "hovermode": "x unified" if len(lines) < SERIES else "closest",
    }
    shown = [_trace(line, most) for line in lines]
    count = sum(len(line.x) for line in lines)
    if sum(len(trace["x"]) for trace in shown) < count:
        description += (
            f" Of {count:,} points those are drawn that are the lowest or highest of their stretch, or its ends; "
            "events.jsonl has all."
        )
    yield Chart(title=title, traces=shown, layout=layout, description=description.strip())


def look(style: int) -> dict[str, Any]:
    """The line and markers of a series; beyond eight the colours come again, with other dashes."""
    colour = f"var(--series-{style % SERIES + 1})"
    dash = _DASHES[(style % SERIES + style // SERIES) % len(_DASHES)]
    return {
        "line": {"color": colour, "dash": dash, "width": 2},
        "marker": {"color": colour, "symbol": _SYMBOLS[style % len(_SYMBOLS)], "size": 6},
    }


def _trace(line: Line, most: int) -> dict[str, Any]:
    places = thinned(line.y, most)
    style = look(line.style)
    if len(places) > _MANY_POINTS:
        style["line"]["width"] = 1.2
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(places) <= _FEW_POINTS else "lines",
        "name": line.name,
        "x": [line.x[at] for at in places],
        "y": [line.y[at] for at in places],
        **style,
    }


def _marks(runs: Sequence[RunRecord]) -> Iterator[Mapping[str, Any]]:
    """Vertical lines where a run was resumed, dashed, and where something went wrong, dotted; of one run only."""
    if len(runs) != 1:
        return
    for kind, dash, colour in (("resume", "dash", "var(--muted)"), ("incident", "dot", "var(--bad)")):
        steps = sorted({event["step"] for event in runs[0].of(kind)})
        for step in steps[:: -(-len(steps) // _MOST_MARKS) or 1]:
            yield {
                "type": "line",
                "xref": "x",
                "yref": "paper",
                "x0": step,
                "x1": step,
                "y0": 0,
                "y1": 1,
                "line": {"color": colour, "width": 1.5, "dash": dash},
            }


Number = float | int | None


def thinned(values: Sequence[Number], most: int) -> list[int]:
    """The places of points that show a curve: of each stretch its lowest and highest, its ends, and a gap in it.

    Every point shown is one of the curve's own; nothing is averaged.

    Args:
        values: The curve; None where it has a gap.
        most: About so many points; at least eight.
    """
    count = len(values)
    if count <= most:
        return list(range(count))
    # A stretch gives at most five points, mostly four.
    stretches = max(2, most // 4)
    places = {0, count - 1}
    for index in range(stretches):
        first, end = index * count // stretches, (index + 1) * count // stretches
        if first < end:
            places |= _telling(values, first, end)
    return sorted(places)


def _telling(values: Sequence[Number], first: int, end: int) -> set[int]:
    known = [(value, at) for at, value in enumerate(values[first:end], start=first) if _is_number(value)]
    if not known:
        return {first}
    gaps = [at for at in range(first, end) if not _is_number(values[at])]
    return {known[0][1], known[-1][1], min(known)[1], max(known)[1], *gaps[:1]}


def _is_number(value: Number) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)
