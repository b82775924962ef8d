"""What does a sweep over batch sizes come to: per rule, what each batch takes, and where the knee is?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.formulas.batch_law import BatchLaw, SweepPoint, fit_batch_law, why_no_law
from paceline.formulas.intervals import Interval, time_to_event
from paceline.studies.batch_sweep.rates import Rule
from paceline.studies.batch_sweep.sweep import SweepRun, Swept, with_batch


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


def conclude(swept: Swept) -> SweepReport:
    """Bring a sweep's runs together."""
    asked = swept.asked
    rules = [_of_rule(swept, rule) for rule in asked.rules]
    runs = sorted(swept.runs.values(), key=lambda run: run.key)
    return SweepReport(
        name=swept.loaded.name,
        target=f"{asked.target.metric}={asked.target.value:g}",
        seeds=asked.seeds,
        rules=rules,
        notes=_notes(swept, runs),
        runs=runs,
    )


def _of_rule(swept: Swept, rule: Rule) -> RuleResult:
    rows, points = [], []
    for batch in swept.asked.batch_sizes:
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
    models = {each: with_batch(recipe, each, swept.asked.processes).model for each in swept.asked.batch_sizes}
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
