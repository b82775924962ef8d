"""Sections of speed, memory and scaling; of events, samples and the doctor."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any

import numpy as np

from paceline.pages.charts import SERIES
from paceline.pages.page import Block, Chart, Table, Text
from paceline.parsing.units import counted, format_bytes, format_count, format_seconds
from paceline.reports.html.runs import Event, RunRecord
from paceline.reports.html.training import curves, of_runs, series_style
from paceline.telemetry.meter import PHASES

_LEAST_SHARE = 0.01  # share of a step; thinner segments are invisible in a bar
_LEAST_RECORDS, _MOST_BINS = 20, 40
_PATTERNS = ("", "/", ".", "x", "\\", "-", "|", "+", "")


def speed(runs: Sequence[RunRecord]) -> Iterator[Block]:
    """Return the section's blocks."""
    for run in runs:
        if run.attribution is not None and run.attribution.bottleneck:
            yield Text(f"{_prefix(run, runs)}Bound by {run.attribution.bottleneck}")
        elif run.attribution is not None:
            yield Text(f"{_prefix(run, runs)}No single bottleneck stands out.")
    for key in ("throughput_samples_per_second", "throughput_tokens_per_second", "padding_fraction"):
        yield from _over_steps(runs, key)
    yield from _attribution(runs)
    yield from _over_steps(runs, "data_wait_fraction")
    yield from _step_times(runs)
    yield from curves("MFU", "share of the peak", of_runs(runs, "mfu", "MFU"), runs, tickformat="~%")
    for run in runs:
        yield from (Text(f"{_prefix(run, runs)}{note}") for note in (run.attribution.notes if run.attribution else ()))


# Keys of step records, each with chart title, unit, description, and whether it is a share.
_OVER_STEPS = {
    "throughput_samples_per_second": (
        "Throughput",
        "samples per second",
        "Over all processes, without each launch's first three steps.",
        False,
    ),
    "throughput_tokens_per_second": ("Tokens", "tokens per second", "Over all processes, without padding.", False),
    "padding_fraction": ("Padding", "share of what is computed", "Positions in the batches without a token.", True),
    "data_wait_fraction": ("Waiting for data", "share of a step", "Of the time of a step, on the first process.", True),
}


def _over_steps(runs: Sequence[RunRecord], key: str) -> Iterator[Block]:
    """Plot one key of step records from zero; None for runs that do not record it."""
    title, unit, description, is_share = _OVER_STEPS[key]
    lines = of_runs(runs, key, title.lower())
    axis = {"tickformat": "~%"} if is_share else {}
    yield from curves(title, unit, lines, runs, description, rangemode="tozero", **axis)


def _attribution(runs: Sequence[RunRecord]) -> Iterator[Block]:
    """Plot one stacked bar of step phases per run."""
    attributed = [(run, run.attribution) for run in runs if run.attribution is not None and run.attribution.phases]
    if not attributed:
        return
    traces = []
    for style, phase in enumerate(PHASES):
        phases = [
            next((each for each in attribution.phases if each.name == phase), None) for _, attribution in attributed
        ]
        if all(each is None or each.share < _LEAST_SHARE for each in phases):
            continue
        pattern = {"shape": _PATTERNS[style], "fillmode": "overlay", "fgcolor": "var(--surface)", "size": 8}
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": phase.replace("_", " "),
                "y": [run.name for run, _ in attributed],
                "x": [None if each is None else 1e3 * each.seconds for each in phases],
                "customdata": [None if each is None else each.share for each in phases],
                "hovertemplate": "%{fullData.name}: %{x:.3f} ms, %{customdata:.1%}<extra></extra>",
                "marker": {
                    "color": f"var(--series-{style + 1})" if style < SERIES else "var(--muted)",
                    "line": {"color": "var(--surface)", "width": 1},
                    "pattern": {**pattern, "solidity": 0.18},
                },
            }
        )
    rows = [
        (*[run.name] * (len(runs) > 1), each.name, round(1e3 * each.seconds, 6), f"{each.share:.1%}")
        for run, attribution in attributed
        for each in attribution.phases
    ]
    columns = (*["run"] * (len(runs) > 1), "phase", "ms per step", "share")
    steps = "; ".join(
        f"{counted(each.steps, 'step')} of {1e3 * each.step_seconds:.4g} ms" for _, each in attributed[:1]
    )
    yield Chart(
        title="Where the time of a step goes",
        traces=traces,
        layout={
            "barmode": "stack",
            "height": max(320, 150 + 34 * len(attributed)),
            "xaxis": {"title": "ms per step"},
            "yaxis": {"showticklabels": len(runs) > 1, "ticks": "", "type": "category", "autorange": "reversed"},
            "bargap": 0.35,
            "legend": {"traceorder": "normal"},
        },
        description=(f"Means over {steps}." if len(attributed) == 1 else "Means per step, on the first process.")
        + " Phases below 1 % are in the table only.",
        table=Table(columns=columns, rows=rows, caption="Figures of this chart", folded=True),
    )


def _step_times(runs: Sequence[RunRecord]) -> Iterator[Block]:
    """Plot the distribution of mean step times over records."""
    times = [
        [
            1e3 * event["step_seconds"]
            for event in run.of("step")
            if event.get("step_seconds") is not None and event.get("throughput_samples_per_second") is not None
        ]
        for run in runs
    ]
    flat = [value for values in times for value in values]
    if len(flat) < _LEAST_RECORDS:
        return
    edges = np.histogram_bin_edges(flat, min(_MOST_BINS, math.isqrt(len(flat))))
    # Zero at both ends closes the shape.
    centres = [float(each) for each in np.append(edges, 2 * edges[-1] - edges[-2]) - (edges[1] - edges[0]) / 2]
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": run.name,
            "x": centres,
            "y": [0, *np.histogram(values, edges)[0].tolist(), 0],
            "line": {**series_style(style)["line"], "shape": "hvh"},
            **({"fill": "tozeroy", "fillcolor": "var(--band)"} if len(runs) == 1 else {}),
        }
        for style, (run, values) in enumerate(zip(runs, times, strict=True))
    ]
    yield Chart(
        title="How long steps took",
        traces=traces,
        layout={
            "xaxis": {"title": "ms per step"},
            "yaxis": {"title": "records", "rangemode": "tozero"},
            "showlegend": len(runs) > 1,
        },
        description="Each record counts once, with its mean; a launch's first steps are left out.",
    )


def memory(runs: Sequence[RunRecord]) -> Iterator[Block]:
    """Plot measured peak memory against the estimate."""
    rows = [
        (
            run.name,
            _size(None if run.summary is None else run.summary.peak_memory_bytes),
            _size((run.extra("estimate.json") or {}).get("needed_bytes", _expected_bytes(run))),
            _size(run.plan.get("device_memory_bytes")),
            run.plan.get("device_name"),
        )
        for run in runs
    ]
    columns = ("run", "measured peak", "estimated", "of the device", "device")
    yield Table(columns=columns, rows=rows, caption="Peak memory of the first process")
    if any(run.plan.get("device") == "cpu" for run in runs):
        yield Text("On a CPU, both figures are of the whole process, with its libraries.")
    for run in runs:
        estimate = run.extra("estimate.json") or {}
        causes, outside = (estimate.get("peak") or {}).get("causes"), estimate.get("outside_bytes")
        if isinstance(causes, Mapping) and causes:
            libraries = {"libraries and runtime": outside} if isinstance(outside, int | float) and outside else {}
            by_cause = {**causes, **libraries}
            bars = {"type": "bar", "orientation": "h", "name": "MiB", "marker": {"color": "var(--series-1)"}}
            names, sizes = [name.replace("_", " ") for name in by_cause], [each / 2**20 for each in by_cause.values()]
            yield Chart(
                title=f"Estimated memory of a step by cause, {run.name}",
                traces=[{**bars, "y": names, "x": sizes}],
                layout={"xaxis": {"title": "MiB"}, "yaxis": {"autorange": "reversed", "type": "category"}},
                description="From paceline estimate, without running a step.",
            )
        elif len(runs) == 1:
            yield Text(
                f"The next report shows an estimate by cause after `paceline estimate {run.path} --json > "
                f"{run.path}/estimate.json`."
            )


def _expected_bytes(run: RunRecord) -> int | None:
    """Return the memory that the run predicted before its first step, if it did."""
    forecasts = (each for each in reversed(run.events) if each.get("what") == "forecast")
    return next(forecasts, {}).get("expected_memory_bytes")


def _size(count: Any) -> str | None:
    return format_bytes(count) if isinstance(count, (int, float)) else None


def _prefix(run: RunRecord, runs: Sequence[RunRecord]) -> str:
    return f"{run.name}: " if len(runs) > 1 else ""


def scaling(runs: Sequence[RunRecord]) -> Iterator[Block]:
    """Return the section's blocks; none unless there are several world sizes."""
    yield from _measured(runs)
    for run in runs:
        # Result of `paceline scale`, if its JSON is in the run directory.
        rows = [each for each in (run.extra("scale.json") or {}).get("rows", ()) if isinstance(each, Mapping)]
        if rows:
            columns = ("devices", "strategy", "samples/s", "between", "efficiency")
            predicted = [(each.get("devices"), each.get("strategy"), *_prediction(each)) for each in rows]
            yield Table(columns=columns, rows=predicted, caption=f"Scaling of {run.name}, predicted by paceline scale")


def _prediction(row: Mapping[str, Any]) -> tuple[float | None, str | None, str | None]:
    """Return a predicted rate, its range and its efficiency, keeping only numbers."""
    keys = ("samples_per_second", "samples_per_second_low", "samples_per_second_high", "efficiency")
    rate, low, high, share = (each if isinstance(each := row.get(key), int | float) else None for key in keys)
    return (
        None if rate is None else round(rate, 1),
        None if low is None or high is None else f"{low:,.0f} – {high:,.0f}",
        None if share is None else f"{share:.1%}",
    )


def _measured(runs: Sequence[RunRecord]) -> Iterator[Block]:
    rates = ((run.world_size, run.summary and run.summary.throughput_samples_per_second, run) for run in runs)
    timed_runs = sorted(((size, rate, run) for size, rate, run in rates if rate), key=itemgetter(0))
    sizes = {size for size, _, _ in timed_runs}
    if len(sizes) < 2:
        return
    fewest, base = timed_runs[0][:2]
    rows = [
        (
            run.name,
            size,
            run.plan.get("global_batch_size"),
            round(rate, 1),
            f"{rate / base:.2f}",
            f"{rate * fewest / (base * size):.1%}",
        )
        for size, rate, run in timed_runs
    ]
    yield Text(
        f"Relative to {timed_runs[0][2].name}, the run with the fewest processes. Runs of other recipes differ in more."
    )
    measured = {"x": [size for size, _, _ in timed_runs], "y": [rate for _, rate, _ in timed_runs], "name": "measured"}
    ideal = {"x": sorted(sizes), "y": [base * size / fewest for size in sorted(sizes)], "name": "in proportion"}
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


_ROWS = {
    "evaluation": ("circle", "var(--series-1)"),
    "checkpoint": ("square", "var(--series-3)"),
    "profile": ("star", "var(--series-6)"),
    "resume": ("triangle-right", "var(--series-4)"),
    "incident": ("x", "var(--bad)"),
    "stop": ("diamond", "var(--series-5)"),
}
_IN_TABLE = ("resume", "incident", "stop", "finish", "start", "measurement")
_MOST_ROWS, _MOST_POINTS = 200, 1000


def timeline(runs: Sequence[RunRecord]) -> Iterator[Block]:
    """Return the section's blocks."""
    if len(runs) == 1 and runs[0].events:
        yield _timeline_chart(runs[0])
    rows = [(run, event) for run in runs for event in run.events if event["event"] in _IN_TABLE]
    several = len(runs) > 1
    entries = [
        (*[run.name] * several, event["event"], _date(event["time"])[:-4], event["step"], _description(event))
        for run, event in rows
    ]
    if not entries:
        yield Text("Nothing is recorded yet.")
        return
    shown = entries
    if len(entries) > _MOST_ROWS:  # then rare events, and the last of the others
        is_rare = [event["event"] not in ("incident", "measurement") for _, event in rows]
        rare, many = ([at for at, rare_event in enumerate(is_rare) if rare_event is kind] for kind in (True, False))
        shown = [entries[index] for index in sorted([*rare[-_MOST_ROWS // 2 :], *many[-_MOST_ROWS // 2 :]])]
    selection = f" ({len(shown)} of {len(entries):,})" if len(shown) < len(entries) else ""
    columns = (*["run"] * several, "event", "time (UTC)", "step", "what happened")
    yield Table(columns=columns, rows=shown, caption=f"Launches, resumes, incidents and stops{selection}")
    incidents = Counter((run.name, event["incident"]) for run, event in rows if event["event"] == "incident")
    if sum(incidents.values()) > len(incidents):
        by_kind = [(*[name] * several, kind, count) for (name, kind), count in incidents.most_common()]
        yield Table(columns=(*["run"] * several, "incident", "times"), rows=by_kind, caption="Incidents by kind")


def ledger_counts(runs: Sequence[RunRecord]) -> Iterator[Block]:
    """Show what the ledger proves for each run."""
    counts = [(run.name, None if run.summary is None else run.summary.ledger) for run in runs]
    rows = [
        (
            name,
            each.epochs_complete,
            each.duplicates,
            each.missing,
            each.broken,
            "no" if each.duplicates or each.missing else "yes",
        )
        for name, each in counts
        if each is not None
    ]
    if rows:
        columns = ("run", "epochs complete", "used twice", "missing", "broken", "each sample once per epoch")
        yield Table(columns=columns, rows=rows, caption="Samples in the ledger, counted when the run ended")
    for name, each in counts:
        if each is None:
            yield Text(f"{name}: the ledger is counted when the run completes or is stopped.")
    target = runs[0].path if len(runs) == 1 else "RUN"
    yield Text(
        f"`paceline audit {target}` counts it again, and compares each step's samples with those that the recipe "
        "determines."
    )


def findings(runs: Sequence[RunRecord]) -> Iterator[Block]:
    """Show the findings of `paceline doctor`, if its JSON is in the run directory."""
    for run in runs:
        diagnosis = run.extra("doctor.json")
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        if diagnosis is None:
            yield Text(
                f"{prefix}The doctor was not run: run `paceline doctor {run.path} --json > {run.path}/doctor.json`, "
                "and the next report shows its findings."
            )
            continue
        listed = [each for each in diagnosis.get("findings", ()) if isinstance(each, Mapping)]
        if not listed:
            yield Text(f"{prefix}The doctor found nothing.", kind="good")
            continue
        rows = [_finding(each) for each in listed]
        columns = ("finding", "severity", "evidence", "what to change", "worth")
        yield Table(columns=columns, rows=rows, caption=f"{prefix}What the doctor found")


def _finding(finding: Mapping[str, Any]) -> tuple[Any, ...]:
    advice, gain = finding.get("advice"), finding.get("gain")
    gain_text = finding.get("expected")
    if isinstance(gain, Mapping) and isinstance(gain.get("middle"), (int, float)):
        gain_text = f"{gain['middle']:.3f} times as fast, measured"
    change = advice.get("words") if isinstance(advice, Mapping) else advice
    return (finding.get("name"), finding.get("severity"), finding.get("evidence"), change, gain_text)


def _description(event: Event) -> str:
    match event["event"]:
        case "start":
            return f"began with {counted(event['world_size'], 'process')}, Paceline {event.get('version', '')}".strip()
        case "evaluation":
            return f"{event['weights']} weights"
        case "checkpoint":
            return str(event["checkpoint"])
        case "resume":
            return f"resumed from {event['checkpoint']}"
        case "incident":
            return f"{event['incident']}: {event['message']}"
        case "stop":
            return f"stopped: {event['reason']}"
        case "finish":
            message = f": {event['message']}" if event.get("message") else ""
            return f"{event['status']} after {format_seconds(event['train_seconds'])} of training{message}"
        case _:
            return str(event.get("message", ""))


def _timeline_chart(run: RunRecord) -> Chart:
    """Plot launches as bars over wall-clock time, and all other events as marks."""
    launches = list(_launches(run.events))
    bars = {
        "type": "bar",
        "orientation": "h",
        "name": "launch",
        "base": [_date(first) for first, _ in launches],
        "x": [max(1.0, 1e3 * (last - first)) for first, last in launches],
        "y": ["launch"] * len(launches),
        "marker": {"color": "var(--series-8)", "line": {"color": "var(--surface)", "width": 1}},
        "customdata": [format_seconds(last - first) for first, last in launches],
        "hovertemplate": "launch, %{customdata}<extra></extra>",
    }
    counts = {kind: len(run.of(kind)) for kind in _ROWS if run.of(kind)}
    marks = []
    for kind, count in counts.items():
        symbol, colour = _ROWS[kind]
        shown = run.of(kind)[:: -(-count // _MOST_POINTS)]
        marks.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": kind,
                "x": [_date(event["time"]) for event in shown],
                "y": [kind] * len(shown),
                "customdata": [[event["step"], _description(event)[:160]] for event in shown],
                "hovertemplate": "%{fullData.name} after step %{customdata[0]:,}: %{customdata[1]}<extra></extra>",
                "marker": {"symbol": symbol, "color": colour, "size": 10},
            }
        )
    rows = ["launch", *counts]
    counts = {"launch": len(launches), **counts}
    return Chart(
        title="The run over time",
        traces=[bars, *marks],
        layout={
            "height": 110 + 34 * len(rows),
            "barmode": "overlay",
            "bargap": 0.5,
            "showlegend": False,
            "xaxis": {"type": "date", "title": "time (UTC)"},
            "yaxis": {"type": "category", "categoryarray": rows[::-1], "ticks": "", "showline": False},
        },
        description="Bars are launches; nothing trained between them.",
        wide=True,
        table=Table(columns=("event", "times"), rows=[*counts.items()], caption="Figures of this chart", folded=True),
    )


def _launches(events: Sequence[Event]) -> Iterator[tuple[float, float]]:
    """Return the launches: from each start, or a resume right before it, to the last event before the next."""
    first: float | None = None
    last, resumed = 0.0, False
    for event in events:
        if event["event"] in ("start", "resume") and not resumed:
            if first is not None:
                yield first, last
            first = event["time"]
        resumed = event["event"] == "resume"
        last = event["time"]
    if first is not None:
        yield first, last


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def steps_in_words(run: RunRecord) -> str:
    """Describe a run's progress."""
    total = run.total_steps
    return f"{format_count(run.step)}{f' of {format_count(total)}' if total else ''} steps"
