"""Section Scaling: throughput of runs with different numbers of processes, and the prediction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.pages.page import Block, Chart, Table, Text
from paceline.report.html.runs import RunRecord


def scaling(runs: Sequence[RunRecord]) -> Iterator[Block]:
    """The section's blocks; none where nothing is told of more than one world size."""
    yield from _measured(runs)
    for run in runs:
        yield from _predicted(run)


def _measured(runs: Sequence[RunRecord]) -> Iterator[Block]:
    known = sorted(
        (
            (run.world_size, run.summary.throughput_samples_per_second, run)
            for run in runs
            if run.summary is not None and run.summary.throughput_samples_per_second
        ),
        key=lambda each: each[0],
    )
    sizes = {size for size, _, _ in known}
    if len(sizes) < 2:
        return
    least, base = known[0][:2]
    rows = [
        (
            run.name,
            size,
            run.plan.get("global_batch_size"),
            round(rate, 1),
            f"{rate / base:.2f}",
            f"{rate * least / (base * size):.1%}",
        )
        for size, rate, run in known
    ]
    yield Text(f"Beside {known[0][2].name}, the run with the fewest processes. Runs of other recipes differ in more.")
    measured = {"x": [size for size, _, _ in known], "y": [rate for _, rate, _ in known], "name": "measured"}
    ideal = {"x": sorted(sizes), "y": [base * size / least for size in sorted(sizes)], "name": "in proportion"}
    axis = {"type": "log", "tickmode": "array", "tickvals": sorted(sizes)}
    yield Chart(
        title="Throughput by number of processes",
        traces=[
            {**measured, "mode": "markers", "marker": {"size": 10, "color": "var(--series-1)"}},
            {**ideal, "mode": "lines", "line": {"dash": "dot", "color": "var(--muted)"}},
        ],
        layout={"xaxis": {"title": "processes", **axis}, "yaxis": {"title": "samples per second", "type": "log"}},
    )
    columns = ("run", "processes", "global batch", "samples/s", "speed-up", "efficiency")
    yield Table(columns=columns, rows=rows, caption="Scaling, measured")


def _predicted(run: RunRecord) -> Iterator[Block]:
    """What `paceline scale` said, where its JSON lies in the run directory."""
    report = run.extra("scale.json")
    rows = [each for each in (report or {}).get("rows", ()) if isinstance(each, Mapping)]
    if not rows:
        return
    told = [
        (
            each.get("devices"),
            each.get("strategy"),
            _number(each.get("samples_per_second")),
            _range(each),
            f"{share:.1%}" if isinstance(share := each.get("efficiency"), int | float) else None,
        )
        for each in rows
    ]
    columns = ("devices", "strategy", "samples/s", "between", "efficiency")
    yield Table(columns=columns, rows=told, caption=f"Scaling of {run.name}, predicted by paceline scale")


def _number(value: Any) -> float | None:
    return round(value, 1) if isinstance(value, (int, float)) else None


def _range(row: Mapping[str, Any]) -> str | None:
    low, high = _number(row.get("samples_per_second_low")), _number(row.get("samples_per_second_high"))
    return None if low is None or high is None else f"{low:,.0f} – {high:,.0f}"
