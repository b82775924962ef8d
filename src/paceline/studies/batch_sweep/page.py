"""How is a sweep shown: one JSON file and one page with its law?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.formulas.batch_law import BatchLaw
from paceline.pages.page import Chart, Page, Section, Table, Text, write_page
from paceline.records.run_directory import write_json
from paceline.studies.batch_sweep.report import BatchRow, RuleResult, SweepReport, knee_in_words

_LAW = (
    "One law in three spellings: (S / S_min - 1) (E / E_min - 1) = 1 for steps S and samples E, steps = S_min "
    "(1 + B_crit / B), and epochs = epochs_min (1 + B / B_crit). At the knee, B_crit, a run takes twice the fewest "
    "steps and twice the fewest samples (McCandlish et al. 2018)."
)
_STEPS = (
    "Steps to the target lie between two evaluations, the last one that was not good enough and the first that was: in "
    "between, the metric is taken to change evenly."
)


def write_sweep(folder: Path, report: SweepReport) -> list[Path]:
    """Write ``sweep-batch.json`` and ``sweep-batch.html``."""
    path = folder / "sweep-batch.json"
    write_json(path, report.to_json())
    return [path, write_page(folder / "sweep-batch.html", sweep_page(report))]


def sweep_page(report: SweepReport) -> Page:
    """The page of a sweep."""
    return Page(
        title="Steps and samples by batch size",
        subtitle=f"{report.name} to {report.target}, {report.seeds} runs each",
        sections=(
            Section(title="The law", blocks=(Text(_LAW, _STEPS, *report.notes), *sweep_charts(report.rules))),
            *(
                Section(title=f"Rule: {each.rule}", blocks=(Text(knee_in_words(each)), _table(each)))
                for each in report.rules
            ),
        ),
    )


def sweep_charts(rules: Sequence[RuleResult]) -> tuple[Chart, Chart]:
    """Samples against steps, and both against the batch."""
    log = {"type": "log"}
    steps, samples, batch = (
        dict[str, Any](title={"text": text}, **log) for text in ("steps", "samples", "samples in a step")
    )
    trade = Chart(
        title="Samples against steps to the target",
        traces=[trace for rule in rules for trace in _traces(rule, lambda b, s: (s, b * s))],
        layout={"xaxis": steps, "yaxis": samples},
        description="Each run's samples against its steps, and the fitted hyperbola.",
    )
    tried = sorted({row.batch for rule in rules for row in rule.rows})
    batch |= {"tickmode": "array", "tickvals": tried, "ticktext": [str(each) for each in tried]}
    by_batch = Chart(
        title="Samples to the target by batch",
        traces=[trace for rule in rules for trace in _traces(rule, lambda b, s: (b, b * s))],
        layout={"xaxis": batch, "yaxis": samples},
        description="Samples to the target by batch size: flat up to the knee, and rising in proportion beyond it.",
    )
    return trade, by_batch


def _traces(rule: RuleResult, place: Any) -> list[dict[str, Any]]:
    reached = [place(each.batch, each.steps) for each in rule.points if each.reached]
    found = [_trace(f"{rule.rule}: runs", reached, mode="markers")]
    if rule.law is not None and reached:
        batches = [each.batch for each in rule.points]
        found.append(_trace(f"{rule.rule}: law", _curve(rule.law, min(batches), max(batches), place), mode="lines"))
    return found


def _curve(law: BatchLaw, low: float, high: float, place: Any) -> list[tuple[float, float]]:
    return [place(batch, law.steps(batch)) for batch in np.geomspace(low, high, 60).tolist()]


def _trace(name: str, points: Sequence[tuple[float, float]], *, mode: str) -> dict[str, Any]:
    return {"type": "scatter", "mode": mode, "name": name, "x": [x for x, _ in points], "y": [y for _, y in points]}


def _table(rule: RuleResult) -> Table:
    return Table(
        columns=COLUMNS,
        rows=tuple(map(tuple, table_rows(rule))),
        caption=f"Medians of the runs that got there, {rule.rule} rule",
    )


COLUMNS = ("batch", "rate", "there", "steps", "fewest, most", "samples", "by the law")


def table_rows(rule: RuleResult) -> list[tuple[str, ...]]:
    """Of a table of its batches, in words."""
    rows: list[tuple[str, ...]] = []
    for row in rule.rows:
        there = f"{row.reached} of {row.runs}"
        first = (f"{row.batch:,}", f"{row.lr:.3g}", there)
        if row.steps is None or not row.reached:
            rows.append((*first, "-", "", "-", ""))
            continue
        law = "" if rule.law is None else f"{rule.law.examples(row.samples_per_step):,.0f}"
        rows.append((*first, _count(row.steps.middle), _between(rule, row), _count(row.samples), law))
    return rows


def _count(value: float | None) -> str:
    return "-" if value is None or np.isinf(value) else f"{value:,.0f}"


def _between(rule: RuleResult, row: BatchRow) -> str:
    """The fewest and the most steps of the runs that got there; an interval of three runs would say less."""
    steps = [each.steps for each in rule.points if each.reached and each.batch == row.samples_per_step]
    return f"{min(steps):,.0f}, {max(steps):,.0f}" if steps else ""
