"""How is a measured noise scale shown: one JSON file and one page?"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.formulas.noise import critical_range
from paceline.pages.page import Chart, Page, Section, Table, Text, write_page
from paceline.records.run_directory import write_json

if TYPE_CHECKING:
    from paceline.studies.noise_scale import NoiseReport


def write_noise(folder: Path, report: NoiseReport) -> list[Path]:
    """Write ``noise-scale.json`` and ``noise-scale.html``."""
    path = folder / "noise-scale.json"
    write_json(path, report.to_json())
    return [path, write_page(folder / "noise-scale.html", _page(report))]


def _page(report: NoiseReport) -> Page:
    known = [(each.step, found) for each in report.points if (found := each.averages.noise_scale()) is not None]
    rows = []
    for step, found in known:
        low, high = critical_range(found)
        rows.append((step, *(_written(each) for each in (found.middle, found.low, found.high, low, high))))
    chart = Chart(
        title=f"Gradient noise scale, in {report.unit}",
        traces=[_trace(known), _own_batch(report)],
        layout={"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": report.unit}, "type": "log"}},
        description="The noise scale over training with its 95 % interval, and the recipe's batch beside it; an arrow "
        "upwards is an interval without an upper end.",
    )
    columns = ("step", "noise scale", "from", "to", "critical batch from", "to")
    blank = len(report.points) - len(known)
    note = f"At {blank} of {len(report.points)} points the noise still hid the gradient: they have no value."
    text = Text(
        "The noise scale is the variance of one sample's gradient over the squared length of the true one (McCandlish "
        "et al. 2018). Up to batches of about that size a larger one saves steps nearly in proportion; far above, it "
        "only costs samples. The critical batch is of its order of magnitude: the range goes ten times beyond the "
        "interval.",
        *([note] if blank else []),
    )
    table = Table(columns=columns, rows=tuple(rows), caption=f"Measured, with 95 % intervals, in {report.unit}")
    subtitle = f"{report.name}, batches of {report.global_batch_size} in micro-batches of {report.micro_batch_size}"
    return Page(
        title="Gradient noise scale",
        subtitle=subtitle,
        sections=(Section(title="Course", blocks=(text, chart, table)),),
    )


def _written(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "no end"


def _trace(known: list[tuple[int, Any]]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "noise scale",
        "x": [step for step, _ in known],
        "y": [found.middle for _, found in known],
        # A bar that ends at its point would say that nothing larger is possible.
        "marker": {"symbol": ["circle" if math.isfinite(found.high) else "arrow-up" for _, found in known], "size": 10},
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [found.high - found.middle if math.isfinite(found.high) else None for _, found in known],
            "arrayminus": [found.middle - found.low for _, found in known],
        },
    }


def _own_batch(report: NoiseReport) -> dict[str, Any]:
    steps = [each.step for each in report.points]
    batch = report.batch_weight
    return {"type": "scatter", "mode": "lines", "name": "the recipe's batch", "x": steps, "y": [batch] * len(steps)}
