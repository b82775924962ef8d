"""Events, Samples and Doctor sections: launches, resumes, checkpoints, incidents; ledger counts; findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from paceline.pages.page import Block, Chart, Table, Text
from paceline.report.html.runs import Event, RunRecord
from paceline.units import counted, format_count, format_seconds

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
            yield Text(f"{name}: the ledger is counted when a run completes or is stopped, which it has not been.")
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
