"""Result of a batch-size sweep: what each batch takes under each rule, and where the knee is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from paceline.command import Log
from paceline.metrics.intervals import Interval, time_to_event
from paceline.pages.page import Block, Chart, Table, Text
from paceline.pages.shown import Shown
from paceline_advisor.commands import SweepBatch
from paceline_advisor.formulas.batch_law import BatchLaw, SweepPoint, fit_batch_law, why_no_law
from paceline_advisor.tuning.batch_sweep.sweep import Rule, SweepRun, Swept, sweep, with_batch

_LAW = (
    "One law in three spellings: (S / S_min - 1) (E / E_min - 1) = 1 for steps S and samples E, steps = S_min "
    "(1 + B_crit / B), and epochs = epochs_min (1 + B / B_crit). At the knee, B_crit, a run takes twice the fewest "
    "steps and twice the fewest samples (McCandlish et al. 2018)."
)
_STEPS = (
    "Steps to the target lie between two evaluations, the last one that was not good enough and the first that was: in "
    "between, the metric is taken to change evenly."
)


@dataclass(frozen=True, kw_only=True)
class BatchRow:
    """What a batch takes under a rule.

    Attributes:
        batch: Its size.
        samples_per_step: On average over an epoch.
        lr: The learning rate; of ``tuned``, the best that was tried.
        runs: With it.
        reached: How many got to the target.
        steps: Their median, with those that did not get there; None if nothing could be run.
    """

    batch: int
    samples_per_step: float
    lr: float
    runs: int
    reached: int
    steps: Interval | None

    @property
    def samples(self) -> float | None:
        """Samples to the target, in the median."""
        return None if self.steps is None else self.steps.middle * self.samples_per_step

    def to_json(self) -> dict[str, Any]:
        """The row as one JSON object."""
        steps = None if self.steps is None else self.steps.to_json()
        return {**asdict(self), "steps": steps, "samples": self.samples}


@dataclass(frozen=True, kw_only=True)
class RuleResult:
    """What a rule comes to.

    Attributes:
        rule: How the rate follows the batch.
        rows: By batch.
        points: What the law was fitted to.
        law: None if there are too few points.
        why: No law.
    """

    rule: Rule
    rows: Sequence[BatchRow]
    points: Sequence[SweepPoint]
    law: BatchLaw | None
    why: str

    def to_json(self) -> dict[str, Any]:
        """The result as one JSON object."""
        return {
            "rule": self.rule,
            "batches": [each.to_json() for each in self.rows],
            "law": None if self.law is None else self.law.to_json(),
            "why_no_law": self.why or None,
        }


@dataclass(frozen=True, kw_only=True)
class SweepReport:
    """The whole result.

    Attributes:
        name: Of the recipe.
        target: In words.
        seeds: Runs of each.
        rules: In the order asked for.
        notes: What to know of it.
        runs: Every one.
    """

    name: str
    target: str
    seeds: int
    rules: Sequence[RuleResult]
    notes: Sequence[str]
    runs: Sequence[SweepRun]

    def to_json(self) -> dict[str, Any]:
        """The result as one JSON object."""
        return {
            "recipe": self.name,
            "target": self.target,
            "seeds": self.seeds,
            "rules": [each.to_json() for each in self.rules],
            "notes": list(self.notes),
            "runs": [asdict(each) for each in self.runs],
        }

    def __paceline__(self) -> Shown:
        """Return a table for each rule, and the law as charts."""
        blocks: list[Block | str] = []
        for each in self.rules:
            blocks.append(f"\n{each.rule} rule: {knee_in_words(each)}")
            blocks.append(
                Table(columns=COLUMNS, rows=table_rows(each), caption="Medians of the runs that met the target")
            )
        return Shown(
            title="Steps and samples by batch size",
            subtitle=f"{self.name} to {self.target}, {self.seeds} runs each",
            blocks=[*blocks, *self.notes],
            on_page=[Text(_LAW, _STEPS), *sweep_charts(self.rules)],
            ok=any(run.reached for run in self.runs) or "no run met the target.",
        )


def sweep_batch(asked: SweepBatch, log: Log) -> SweepReport:
    """Make all runs that have not been made yet, and fit the law of each rule."""
    return conclude(sweep(asked, log))


def conclude(swept: Swept) -> SweepReport:
    """Bring a sweep's runs together."""
    asked = swept.asked
    rules = [_of_rule(swept, rule) for rule in asked.lr_rules]
    runs = sorted(swept.runs.values(), key=lambda run: run.key)
    return SweepReport(
        name=swept.loaded.name,
        target=f"{swept.target.metric}={swept.target.value:g}",
        seeds=asked.seeds,
        rules=rules,
        notes=_notes(swept, runs),
        runs=runs,
    )


def _of_rule(swept: Swept, rule: Rule) -> RuleResult:
    rows, points = [], []
    for batch in sorted(swept.asked.batch_sizes):
        rate, runs = _best(swept.of(rule, batch))
        rows.append(_row(rate, runs))
        points += [_point(run) for run in runs if not run.trouble]
    why = why_no_law(points)
    return RuleResult(rule=rule, rows=rows, points=points, law=None if why else fit_batch_law(points), why=why)


def _point(run: SweepRun) -> SweepPoint:
    return SweepPoint(run.samples_per_step, run.steps, run.reached)


def _best(by_rate: Mapping[float, Sequence[SweepRun]]) -> tuple[float, Sequence[SweepRun]]:
    """The rate with which most get there, and of those the one with the fewest steps."""

    def merit(item: tuple[float, Sequence[SweepRun]]) -> tuple[int, float]:
        steps = _median(item[1])
        return -sum(run.reached for run in item[1]), math.inf if steps is None else steps.middle

    return min(by_rate.items(), key=merit)


def _median(runs: Sequence[SweepRun]) -> Interval | None:
    """Of the steps; a run that failed is one that did not get there by then."""
    watched = [run for run in runs if run.steps > 0]
    if not watched:
        return None
    return time_to_event([run.steps for run in watched], [run.reached for run in watched]).median


def _row(rate: float, runs: Sequence[SweepRun]) -> BatchRow:
    return BatchRow(
        batch=runs[0].batch,
        samples_per_step=runs[0].samples_per_step,
        lr=rate,
        runs=len(runs),
        reached=sum(run.reached for run in runs),
        steps=_median(runs),
    )


def _notes(swept: Swept, runs: Sequence[SweepRun]) -> list[str]:
    notes = []
    coarse = sum(run.reached and run.evaluations == 1 for run in runs)
    if coarse:
        notes.append(
            f"{coarse} runs were at the target when they were first evaluated, and may have been there long before; "
            "set a shorter evaluate.every, or a harder target."
        )
    failed = [run for run in runs if run.trouble]
    if failed:
        notes.append(f"{len(failed)} runs failed and are left out of the law: {failed[0].trouble}")
    recipe = swept.loaded.recipe
    if recipe.schedule.name not in ("constant", "step"):
        notes.append(
            f"schedule.name={recipe.schedule.name} ends with the run, so that steps to the target depend on how long a "
            "run may be; schedule.name=constant does not."
        )
    ghosts = recipe.model.ghost_batch_norm
    models = {each: with_batch(recipe, each, swept.asked.processes).model for each in sorted(swept.asked.batch_sizes)}
    if other := [str(batch) for batch, model in models.items() if model.ghost_batch_norm not in (ghosts, None)]:
        notes.append(
            f"model.ghost_batch_norm={ghosts} does not divide the micro-batches of {', '.join(other)}: BatchNorm's "
            "groups are smaller there."
        )
    short = {run.batch: run.samples_per_step for run in runs if run.samples_per_step < 0.99 * run.batch}
    if short:
        told = ", ".join(f"with {batch} a step has {samples:.0f}" for batch, samples in sorted(short.items()))
        notes.append(f"An epoch's last step has fewer samples: {told} on average, and the law is fitted to that.")
    return notes


def knee_in_words(result: RuleResult) -> str:
    """Where the knee is, as one sentence."""
    if result.law is None:
        return f"no knee: {result.why}"
    knee, tried = result.law.critical_batch, [row.samples_per_step for row in result.rows]
    off = f"the law is off by {100 * result.law.worst:.0f} % at most"
    if knee.low == 0 and math.isinf(knee.high):
        return f"knee unknown: the runs bound it on neither side, more seeds or a wider range of batches would; {off}"
    if math.isinf(knee.high):
        return f"knee above {knee.low:.3g} samples: the batches tried do not reach it; {off}"
    if knee.low == 0:
        return f"knee below {knee.high:.3g} samples: the batches tried are all beyond it; {off}"
    outside = "" if min(tried) <= knee.middle <= max(tried) else ", outside of the batches tried"
    return f"knee at {knee.middle:.3g} samples ({knee.low:.3g} to {knee.high:.3g}){outside}; {off}"


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
