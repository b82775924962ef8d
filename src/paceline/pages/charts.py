"""Charts of a page: Plotly input, plus a table for readers who prefer numbers.

Colours are CSS variables of the page, such as ``var(--series-1)``. The page's script resolves them, so that charts
follow the light or dark theme. Series also differ in their dashes, never by colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.pages.blocks import Table
from paceline.parsing.plain_text import html_text

SERIES = 8
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
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
# Plotly cycles line series through these.
_LINES = [{"line": {"width": 2, "dash": dash}} for dash in DASHES]
_TEMPLATE = {"layout": _LAYOUT, "data": {"scatter": _LINES}}
_TEMPLATES = ("hovertemplate", "texttemplate")
_MOST_ROWS, _MOST_COLUMNS = 200, 40


def log_axis(title: str, values: Sequence[float]) -> dict[str, Any]:
    """Return Plotly's settings of a log axis around positive values, with ticks at 1, 2 and 5 of each decade."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    ticks = [float(f"{first}e{power}") for power in range(low, high + 1) for first in (1, 2, 5)]
    texts = [f"{each:,.10g}" for each in ticks]
    return {"title": title, "type": "log", "tickmode": "array", "tickvals": ticks, "ticktext": texts}


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A Plotly figure with a title, a description and a table.

    Attributes:
        title: What it shows, with the unit if the axes do not give it.
        traces: Plotly traces. Their texts are plain: Plotly's markup works only in templates.
        layout: Plotly layout, merged over the page's default; colours may be variables: ``var(--series-2)``.
        description: One sentence for readers who cannot see it.
        wide: Whether it spans the full page width.
        table: Table below the chart instead of the traces' values.
    """

    title: str
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any] = field(default_factory=dict)
    description: str = ""
    wide: bool = False
    table: Table | None = None

    def html(self, number: int = 1) -> Iterator[str]:
        """Return the placeholder for Plotly, the numbered caption, and the values as a table."""
        height = int(self.layout.get("height", _HEIGHT))
        wide = " wide" if self.wide else ""
        yield f'<figure class="chart{wide}" aria-labelledby="chart-{number}-title">'
        title = html_text(self.title)
        yield f'<figcaption id="chart-{number}-title"><span class="count">Figure {number}</span> {title}'
        yield "</figcaption>"
        label = html_text(f"{self.title}. {self.description}")
        yield f'<div class="plot" id="chart-{number}" role="img" aria-label="{label}" style="height:{height}px"></div>'
        if self.description:
            yield f'<p class="description">{html_text(self.description)}</p>'
        yield from (self.table or figures_table(self)).html()
        yield "</figure>"

    def figure(self) -> dict[str, Any]:
        """Return Plotly's input."""
        layout = {"height": _HEIGHT, "template": _TEMPLATE, **self.layout}
        return {"data": [_to_plotly(trace) for trace in self.traces], "layout": _to_plotly(layout)}


def figures_table(chart: Chart) -> Table:
    """Return the chart's values as a table; long series are sampled evenly, and the caption says so."""
    grids = [trace for trace in chart.traces if "z" in trace]
    columns, rows = _grid(grids[0]) if grids else _series(chart)
    count = len(rows)
    shown = [rows[at] for at in sample_evenly(count, _MOST_ROWS)]
    selection = f" ({len(shown)} of {count:,} rows, spread evenly)" if len(shown) < count else ""
    return Table(columns=columns, rows=shown, caption=f"Figures of this chart{selection}", folded=True)


def _grid(trace: Mapping[str, Any]) -> tuple[list[str], list[list[object]]]:
    """Return a row for each y of a heatmap or surface and a column for each x."""
    z = trace["z"]
    x, y = list(trace.get("x", range(len(z[0])))), trace.get("y", range(len(z)))
    sampled_columns = sample_evenly(len(x), _MOST_COLUMNS)
    rows = [[_label(at), *(row[column] for column in sampled_columns)] for at, row in zip(y, z, strict=True)]
    return ["", *(_label(x[column]) for column in sampled_columns)], rows


def _series(chart: Chart) -> tuple[list[str], list[list[object]]]:
    """Return a row for each x and a column for each series and its intervals."""
    values_by_x: dict[object, dict[int, object]] = {}
    columns = [_axis_title(chart.layout, "xaxis") or "x"]
    for trace in chart.traces:
        ys = trace.get("y", ())
        xs, axis, error = trace.get("x", range(len(ys))), "yaxis", trace.get("error_y", {})
        if trace.get("orientation") == "h":
            xs, ys, axis = ys, xs, "xaxis"
        name = str(trace.get("name") or _axis_title(chart.layout, axis) or chart.title)
        upper = f"{name}, {'above' if 'arrayminus' in error else '±'}"
        for title, values in {name: ys, upper: error.get("array"), f"{name}, below": error.get("arrayminus")}.items():
            if values is not None:
                for x, y in zip(xs, values, strict=False):
                    values_by_x.setdefault(x, {})[len(columns)] = y
                columns.append(title)
    keys = sorted(values_by_x, key=_sort_key)
    return columns, [[key, *(values_by_x[key].get(at) for at in range(1, len(columns)))] for key in keys]


def _axis_title(layout: Mapping[str, Any], axis: str) -> str:
    title = layout.get(axis, {}).get("title", "")
    return str(title.get("text", "")) if isinstance(title, Mapping) else str(title)


def _sort_key(key: object) -> tuple[int, float]:
    """Sort numbers by size; keep words in their original order."""
    return (0, float(key)) if isinstance(key, (int, float)) and not math.isnan(key) else (1, 0.0)


def _label(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def sample_evenly(count: int, most: int) -> list[int]:
    """Return at most a given number of evenly spread indices, including the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(at * (count - 1) / (most - 1)) for at in range(most)})


def _to_plotly(value: Any, key: str = "") -> Any:
    """Copy a figure with its texts escaped for Plotly and without numbers that JSON cannot represent."""
    match value:
        case str() if key == "title":  # Plotly expects an object here; text is shorter to write.
            return {"text": html_text(value, quote=False)}
        case str():
            return value if key in _TEMPLATES else html_text(value, quote=False)
        case None | bool() | int():
            return value
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {name: _to_plotly(item, name) for name, item in value.items()}
        case _ if hasattr(value, "tolist"):
            return _to_plotly(value.tolist(), key)
        case _:
            return [_to_plotly(item, key) for item in value]
