"""Charts of a page: what Plotly is given, and the table for readers who prefer figures.

Colours are names of the page's style, such as ``var(--series-1)``, which its script looks up, so that charts follow
light and dark. Series differ in their dashes too, never by colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from paceline.escaping import html_text
from paceline.pages.blocks import Table

SERIES = 8
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_AXIS = {
    "automargin": True,
    "gridcolor": "var(--grid)",
    "linecolor": "var(--line)",
    "showline": True,
    "ticks": "outside",
    "tickcolor": "var(--line)",
    "ticklen": 4,
    "zeroline": False,
    "title": {"standoff": 10, "font": {"size": 12.5}},
}
_SPACE_AXIS = {"gridcolor": "var(--grid)", "linecolor": "var(--line)", "backgroundcolor": "rgba(0,0,0,0)"}
_HEIGHT = 320
_LAYOUT: Mapping[str, Any] = {
    "margin": {"l": 56, "r": 18, "t": 12, "b": 44},
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"family": "var(--sans)", "size": 12.5, "color": "var(--muted)"},
    "colorway": [f"var(--series-{each})" for each in range(1, SERIES + 1)],
    "hovermode": "closest",
    "hoverlabel": {
        "bgcolor": "var(--surface)",
        "bordercolor": "var(--line)",
        "font": {"color": "var(--text)", "family": "var(--sans)"},
        "namelength": -1,
    },
    "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "bgcolor": "rgba(0,0,0,0)"},
    "xaxis": _AXIS,
    "yaxis": _AXIS,
    "scene": dict.fromkeys(("xaxis", "yaxis", "zaxis"), _SPACE_AXIS),
}
_TEMPLATE = {"layout": _LAYOUT}
_TEMPLATES = ("hovertemplate", "texttemplate")
_MOST_ROWS, _MOST_COLUMNS = 200, 40


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A Plotly figure with a title, a sentence and a table.

    Attributes:
        title: What it shows, with the unit where the axes do not say it.
        traces: As Plotly takes them. Texts in them are plain: Plotly's markup works in templates alone.
        layout: As Plotly takes it, over the page's own; colours may be names: ``var(--series-2)``.
        description: One sentence for who cannot see it.
        wide: Over the whole width of the page, however wide that is.
        table: Beneath it instead of the traces' own figures.
    """

    title: str
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any] = field(default_factory=dict)
    description: str = ""
    wide: bool = False
    table: Table | None = None

    def html(self, number: int = 1) -> Iterator[str]:
        """The place that Plotly draws in, its caption with the figure's number, and the figures as a table."""
        height = int(self.layout.get("height", _HEIGHT))
        wide = " wide" if self.wide else ""
        yield f'<figure class="chart{wide}" aria-labelledby="chart-{number}-title">'
        title = html_text(self.title)
        yield f'<figcaption id="chart-{number}-title"><span class="count">Figure {number}</span> {title}'
        yield "</figcaption>"
        label = html_text(f"{self.title}. {self.description}", quote=True)
        yield f'<div class="plot" id="chart-{number}" role="img" aria-label="{label}" style="height:{height}px"></div>'
        if self.description:
            yield f'<p class="description">{html_text(self.description)}</p>'
        yield from (self.table or figures_table(self)).html()
        yield "</figure>"

    def figure(self) -> dict[str, Any]:
        """What Plotly is given."""
        layout = {"height": _HEIGHT, "template": _TEMPLATE, **self.layout}
        return {"data": [_plain(trace) for trace in _styled(self.traces)], "layout": _plain(layout)}


def figures_table(chart: Chart) -> Table:
    """The figures that a chart shows; of many, some that are spread evenly, which the caption says."""
    grids = [trace for trace in chart.traces if "z" in trace]
    columns, rows = _grid(grids[0]) if grids else _series(chart)
    count = len(rows)
    shown = [rows[at] for at in _spread(count, _MOST_ROWS)]
    some = f" ({len(shown)} of {count:,} rows, spread evenly)" if len(shown) < count else ""
    return Table(columns=columns, rows=shown, caption=f"Figures of this chart{some}", folded=True)


def _grid(trace: Mapping[str, Any]) -> tuple[list[str], list[list[object]]]:
    """A row for each y of a heatmap, contour or surface, a column for each x."""
    z = [list(row) for row in trace["z"]]
    across = _spread(max((len(row) for row in z), default=0), _MOST_COLUMNS)
    x, y = list(trace.get("x", ())), list(trace.get("y", ()))
    columns = ["", *(_label(x[at]) if at < len(x) else str(at) for at in across)]
    rows = [
        [_label(y[at]) if at < len(y) else str(at), *(row[column] if column < len(row) else None for column in across)]
        for at, row in enumerate(z)
    ]
    return columns, rows


def _series(chart: Chart) -> tuple[list[str], list[list[object]]]:
    """A row for each x, a column for each series and for its intervals."""
    told: dict[object, dict[int, object]] = {}
    columns = [_axis_title(chart.layout, "xaxis") or "x"]
    for trace in chart.traces:
        xs, ys = _points(trace)
        for values, name in ((ys, _name(trace, chart)), *_interval(trace, chart)):
            for x, y in zip(xs, values, strict=False):
                told.setdefault(x, {})[len(columns)] = y
            columns.append(name)
    keys = sorted(told, key=_order)
    return columns, [[key, *(told[key].get(at) for at in range(1, len(columns)))] for key in keys]


def _points(trace: Mapping[str, Any]) -> tuple[list[object], list[object]]:
    """Where a series' figures lie, and the figures."""
    if "values" in trace:
        return list(trace.get("labels", ())), list(trace["values"])
    ys = list(trace.get("y", ()))
    xs = list(trace.get("x", range(len(ys))))
    return (ys, xs) if trace.get("orientation") == "h" else (xs, ys)


def _interval(trace: Mapping[str, Any], chart: Chart) -> Iterator[tuple[list[object], str]]:
    error = trace.get("error_y", {})
    name = _name(trace, chart)
    if "array" in error:
        yield list(error["array"]), f"{name}, {'above' if 'arrayminus' in error else '±'}"
    if "arrayminus" in error:
        yield list(error["arrayminus"]), f"{name}, below"


def _name(trace: Mapping[str, Any], chart: Chart) -> str:
    axis = "x" if trace.get("orientation") == "h" else "y"
    return str(trace.get("name") or _axis_title(chart.layout, f"{axis}axis") or chart.title)


def _axis_title(layout: Mapping[str, Any], axis: str) -> str:
    title = layout.get(axis, {}).get("title", "")
    return str(title.get("text", "")) if isinstance(title, Mapping) else str(title)


def _order(key: object) -> tuple[int, float]:
    """Numbers by size; words stay in the order in which they came."""
    return (0, float(key)) if isinstance(key, (int, float)) and not math.isnan(key) else (1, 0.0)


def _label(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _spread(count: int, most: int) -> list[int]:
    """At most so many of so many places, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(at * (count - 1) / (most - 1)) for at in range(most)})


def _styled(traces: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Give lines their dashes, where they have none of their own."""
    dashes = cycle(_DASHES)
    for trace in traces:
        if trace.get("type", "scatter") != "scatter" or "lines" not in trace.get("mode", "lines"):
            yield dict(trace)
            continue
        line = {"width": 2, **trace.get("line", {})}
        yield {**trace, "line": line if "dash" in line else {**line, "dash": next(dashes)}}


def _plain(value: Any, key: str = "") -> Any:
    """Copy a figure with its texts as Plotly shows them as they are, and no number that JSON has no word for."""
    match value:
        case str() if key == "title":  # Plotly takes an object only; a text is what one writes
            return {"text": html_text(value, quote=False)}
        case str():
            return value if key in _TEMPLATES else html_text(value, quote=False)
        case None | bool() | int():
            return value
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {name: _plain(item, name) for name, item in value.items()}
        case _ if hasattr(value, "tolist"):
            return _plain(value.tolist(), key)
        case _:
            return [_plain(item, key) for item in value]
