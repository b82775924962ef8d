"""Run to a target with several batch sizes, and fit the law of steps and samples."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from paceline.command import Log
from paceline.errors import RecipeError, RunDirectoryError, TrainingError
from paceline.host.world import World
from paceline.metrics.intervals import Interval, time_to_event
from paceline.pages.page import Block, Chart, Table, Text
from paceline.pages.shown import Shown
from paceline.parsing.plain_text import load_json
from paceline.plan.batching import micro_batch_size, with_nearest_ghost_size
from paceline.plan.rates import lr_factor
from paceline.recipe.load import LoadedRecipe, to_yaml
from paceline.recipe.schema import Recipe
from paceline.records.run_directory import write_text
from paceline.trainer.subject import Subject
from paceline_advisor import Json, as_json, frozen, picked
from paceline_advisor.apply import SILENT, with_values
from paceline_advisor.bench.target import MetricTarget, TargetRun, one_run
from paceline_advisor.commands import SweepBatch
from paceline_advisor.formulas.batch_law import BatchLaw, SweepPoint, fit_batch_law, why_no_law
from paceline_advisor.launches import check_can_watch
from paceline_advisor.traces import trace

RUNS_FILE = "runs.jsonl"
Rule = Literal["constant", "linear", "sqrt", "tuned"]
Key = tuple[int, float, int]
"""Batch, learning rate and seed of a run."""
# Factors on the rate by the square-root rule, which lies between the other two rules. They differ by two, so the best
# rate within their range is at most a factor of 1.4 away.
_TUNED = (0.25, 0.5, 1.0, 2.0, 4.0)


@frozen
class SweepRun:
    """One run of a sweep.

    Attributes:
        batch: Its ``batch.global_size``.
        lr: Its ``optimizer.lr``.
        seed: Its ``seed``.
        reached: Whether it reached the target.
        steps: Optimizer steps to the target, interpolated between the evaluations before and after; if it was not
            reached, steps to the last evaluation.
        samples_per_step: Mean samples per step over an epoch, whose last step may be smaller.
        evaluations: Number of evaluations. If the first one met the target, it may have been reached long before.
        seconds: Time in training steps.
        trouble: Why it failed; empty if it did not.
    """

    batch: int
    lr: float
    seed: int
    reached: bool
    steps: float
    samples_per_step: float
    evaluations: int
    seconds: float
    trouble: str = ""

    @property
    def key(self) -> Key:
        """The settings that identify the run."""
        return self.batch, self.lr, self.seed


def sweep_batch(options: SweepBatch, log: Log = lambda _: None) -> Swept:
    """Execute all missing runs, seed by seed, so that a killed sweep soon has a run of every batch.

    Raises:
        PacelineError: If the recipe is invalid, never evaluates, lacks the metric or cannot use one of the batches, or
            if the output contains another sweep.
        TrainingError: If the first run fails.
    """
    check_can_watch("sweep-batch")
    loaded = options.load()
    recipe = loaded.recipe
    if recipe.batch.growth:
        raise RecipeError("batch.growth changes the batch during a run, but a sweep compares fixed ones; leave it out.")
    target = MetricTarget.parse(options.to).of(recipe)
    # Settings that two sweeps must share so that one may use the other's runs.
    settings = {"recipe": to_yaml(recipe), "processes": options.processes, "longest": str(options.longest)}
    identity = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    header = {"sweep": identity, "target": f"{target.metric}={target.value:g}"}
    path = None if options.output is None else options.output / RUNS_FILE
    runs = _read_runs(path, header)
    base_rate = recipe.optimizer.lr * lr_factor(recipe, recipe.batch.global_size)
    planned = list(
        dict.fromkeys(
            (batch, rate, recipe.seed + index)
            for index in range(options.seeds)
            for batch in sorted(options.batch_sizes)
            for rule in options.lr_rules
            for rate in rates_of(rule, batch, recipe.batch.global_size, base_rate)
        )
    )
    _check_plans(options, recipe, planned)
    missing = [each for each in planned if each not in runs]
    if len(missing) < len(planned):
        log(f"{len(planned) - len(missing)} of {len(planned)} runs are already done")
    _write_runs(path, header, runs)
    for number, key in enumerate(missing, start=1):
        batch, lr, seed = key
        run = one_run(target, _recipe_of(options, recipe, *key), processes=options.processes)
        # A failure of a later run does not discard the measured ones.
        if run.trouble and not runs:
            raise TrainingError(f"the first run failed: {run.trouble}")
        found = SweepRun(
            batch=batch,
            lr=lr,
            **picked(run, "seed", "reached", "trouble"),
            steps=steps_to(run, target),
            samples_per_step=min(float(batch), run.plan["train_samples"] / run.plan["steps_per_epoch"])
            if run.plan
            else float(batch),
            evaluations=len(run.evaluations),
            seconds=run.train_seconds,
        )
        runs[key] = found
        _write_runs(path, header, runs)
        outcome = f"{found.steps:.0f} steps to the target" if run.reached else f"target missed after {found.steps:.0f}"
        log(f"run {number} of {len(missing)}: batch {batch}, rate {lr:.3g}, seed {seed}: {run.trouble or outcome}")
    kept = {key: runs[key] for key in planned}
    return Swept(options=options, target=target, loaded=loaded, base_rate=base_rate, runs=kept)


def _check_plans(options: SweepBatch, recipe: Recipe, planned: Sequence[Key]) -> None:
    """Plan a run with each batch, so that an impossible batch is reported before the first run.

    Raises:
        PacelineError: If a run with one of the batches is impossible.
    """
    world = World(world_size=options.processes, local_world_size=options.processes)
    machine = Subject.open(recipe, world, "device").machine
    for batch, key in {key[0]: key for key in planned}.items():
        try:
            trial_recipe = _recipe_of(options, recipe.without_initial_weights(), *key)
            samples = Subject.open(trial_recipe, world, "plan", machine=machine).plan.train_samples
        except RecipeError as error:
            raise RecipeError(f"--batch-sizes: a run with {batch} is not possible: {error}") from error
        if batch > samples:
            raise RecipeError(
                f"--batch-sizes: a step of {batch:,} samples cannot be made of an epoch of {samples:,}, and its rate "
                "would be for another batch; give sizes up to that."
            )


def _recipe_of(options: SweepBatch, recipe: Recipe, batch: int, lr: float, seed: int) -> Recipe:
    values = {
        "seed": seed,
        "optimizer.lr": lr,
        "optimizer.lr_scaling": "none",
        "optimizer.lr_reference_batch": None,
        "train.duration": options.longest or recipe.train.duration,
        **SILENT,
    }
    return with_values(with_batch(recipe, batch, options.processes), values)


def with_batch(recipe: Recipe, batch: int, processes: int) -> Recipe:
    """Return the recipe with another batch, and BatchNorm groups as close to its own as the micro-batches allow.

    Raises:
        RecipeError: If its micro-batches, or the processes, do not divide the batch.
    """
    micro = recipe.batch.micro_size
    # A micro-batch is at most the batch.
    micro = micro if micro == "auto" else min(micro, batch)
    sizes = {"batch.global_size": batch, "batch.micro_size": micro, "model.ghost_batch_norm": None}
    without = with_values(recipe, sizes)
    return replace(without, model=with_nearest_ghost_size(recipe.model, micro_batch_size(without, processes)))


def steps_to(run: TargetRun, target: MetricTarget) -> float:
    """Return the steps until a run reached the target, or until its last evaluation.

    The metric is interpolated linearly between the last evaluation below the target and the first that meets it:
    counting to the latter would add half an interval to every run.
    """
    if not run.evaluations:
        return 0.0
    last = run.evaluations[-1]
    if not run.reached or len(run.evaluations) < 2:
        return float(last["step"])
    before = run.evaluations[-2]
    was, now = before[target.metric], last[target.metric]
    share = 1.0 if was is None or now == was else (target.value - was) / (now - was)
    return float(before["step"] + min(max(share, 0.0), 1.0) * (last["step"] - before["step"]))


def _read_runs(path: Path | None, header: Json) -> dict[Key, SweepRun]:
    """Return the finished runs of a sweep with this header; none without a file.

    Raises:
        RunDirectoryError: If the file is of another sweep.
    """
    if path is None or not path.exists():
        return {}
    # The last line of a killed sweep may be incomplete.
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    try:
        found, *rows = [load_json(line) for line in lines] or [header]
        other_target = found.get("target")
        runs = [SweepRun(**row) for row in rows]
    except (ValueError, TypeError, AttributeError) as error:
        raise RunDirectoryError(f"'{path}' was not written by sweep-batch ({error}); remove it.") from error
    if found != header:
        raise RunDirectoryError(
            f"'{path}' holds the runs of another sweep (to {other_target}, or of an older version of the recipe); "
            f"name another --output, or remove it."
        )
    # A failed run is retried: its cause may be gone.
    return {run.key: run for run in runs if not run.trouble}


def _write_runs(path: Path | None, header: Json, runs: Mapping[Key, SweepRun]) -> None:
    """Write all runs, without an incomplete last line of a killed sweep."""
    if path is not None:
        write_text(path, "".join(json.dumps(row) + "\n" for row in (header, *map(asdict, runs.values()))))


def rates_of(rule: Rule, batch: int, reference_batch: int, reference_rate: float) -> tuple[float, ...]:
    """Return the learning rates that a rule tries with a batch, to six digits; a single one except for ``tuned``.

    Args:
        rule: How the rate scales with the batch.
        batch: Samples in a step.
        reference_batch: The recipe's own batch.
        reference_rate: The recipe's rate for that batch.
    """
    ratio = batch / reference_batch
    factors = {"constant": (1.0,), "linear": (ratio,), "sqrt": (math.sqrt(ratio),)}
    tried = factors.get(rule, tuple(factor * math.sqrt(ratio) for factor in _TUNED))
    # Rounded, so that two rules share equal rates, which run only once.
    return tuple(float(f"{reference_rate * factor:.6g}") for factor in tried)


_LAW = (
    "One law in three forms: (S / S_min - 1) (E / E_min - 1) = 1 for steps S and samples E, steps = S_min "
    "(1 + B_crit / B), and epochs = epochs_min (1 + B / B_crit). At the knee, B_crit, a run takes twice the minimum of "
    "steps and twice the minimum of samples (McCandlish et al. 2018)."
)
_STEPS = (
    "Steps to the target lie between two evaluations, the last one below it and the first that met it; in between, the "
    "metric is interpolated linearly."
)


@frozen
class BatchRow:
    """The cost of a batch size under a rule.

    Attributes:
        batch: Its size.
        samples_per_step: Mean samples per step over an epoch.
        lr: The learning rate; for ``tuned``, the best one tried.
        runs: Runs with that rate.
        reached: Number of runs that reached the target.
        steps: Median steps to the target, with runs that did not reach it as censored; None if no run was evaluated.
    """

    batch: int
    samples_per_step: float
    lr: float
    runs: int
    reached: int
    steps: Interval | None

    @property
    def samples(self) -> float | None:
        """Median samples to the target; None if unknown."""
        return None if self.steps is None else self.steps.middle * self.samples_per_step

    def to_json(self) -> Json:
        """Return the row as one JSON object."""
        return {**vars(self), "samples": self.samples}


@frozen
class RuleResult:
    """Results of a rule.

    Attributes:
        rule: How the rate scales with the batch.
        rows: One row per batch.
        points: The runs that the law is fitted to.
        law: The fitted law; None if there are too few points.
        why: Why there is no law; otherwise empty.
    """

    rule: Rule
    rows: Sequence[BatchRow]
    points: Sequence[SweepPoint]
    law: BatchLaw | None
    why: str

    def to_json(self) -> Json:
        """Return the result as one JSON object."""
        return {**picked(self, "rule", "law"), "batches": self.rows, "why_no_law": self.why or None}


@frozen
class Swept:
    """The measured runs, and what they show.

    Attributes:
        options: The command.
        target: The target of each run.
        loaded: The recipe.
        base_rate: Its peak learning rate with its own batch, after scaling.
        runs: The runs by batch, rate and seed.
    """

    options: SweepBatch
    target: MetricTarget
    loaded: LoadedRecipe
    base_rate: float
    runs: dict[Key, SweepRun]

    @cached_property
    def rules(self) -> tuple[RuleResult, ...]:
        """The results of the rules, in the requested order."""
        return tuple(_of_rule(self, rule) for rule in self.options.lr_rules)

    def to_json(self) -> Json:
        """Return the result as one JSON object."""
        document = {
            "recipe": self.loaded.name,
            "target": f"{self.target.metric}={self.target.value:g}",
            "seeds": self.options.seeds,
            "rules": self.rules,
            "notes": list(self.notes()),
            "runs": [self.runs[key] for key in sorted(self.runs)],
        }
        return dict(as_json(document))

    def __paceline__(self) -> Shown:
        """Return a table for each rule, and the law as charts."""
        blocks: list[Block | str] = []
        for each in self.rules:
            table = Table(columns=COLUMNS, rows=table_rows(each), caption="Steps and samples to the target, medians")
            blocks += [f"\n{each.rule} rule: {knee_in_words(each)}", table]
        target = f"{self.target.metric}={self.target.value:g}"
        return Shown(
            title="Steps and samples by batch size",
            subtitle=f"{self.loaded.name} to {target}, {self.options.seeds} runs each",
            blocks=[*blocks, *self.notes()],
            on_page=[Text(_LAW, _STEPS), *sweep_charts(self.rules)],
            ok=any(run.reached for run in self.runs.values()) or "no run met the target.",
        )

    def notes(self) -> Iterator[str]:
        """Yield notes on the result."""
        runs, recipe = [self.runs[key] for key in sorted(self.runs)], self.loaded.recipe
        if coarse := sum(run.reached and run.evaluations == 1 for run in runs):
            yield (
                f"{coarse} runs met the target at their first evaluation, and may have met it long before; set a "
                f"shorter evaluate.every, or a harder target."
            )
        if failed := [run.trouble for run in runs if run.trouble]:
            yield f"{len(failed)} runs failed and are left out of the law: {failed[0]}"
        if recipe.schedule.name not in ("constant", "step"):
            yield (
                f"schedule.name={recipe.schedule.name} ends with the run, so steps to the target depend on the run's "
                "length; use schedule.name=constant."
            )
        ghosts = recipe.model.ghost_batch_norm
        models = {each: with_batch(recipe, each, self.options.processes).model for each in self.options.batch_sizes}
        if other := [str(each) for each in sorted(models) if models[each].ghost_batch_norm not in (ghosts, None)]:
            yield (
                f"model.ghost_batch_norm={ghosts} does not divide the micro-batches of {', '.join(other)}: BatchNorm's "
                "groups are smaller there."
            )
        if short := {run.batch: run.samples_per_step for run in runs if run.samples_per_step < 0.99 * run.batch}:
            sizes = ", ".join(f"with {batch} a step has {samples:.0f}" for batch, samples in sorted(short.items()))
            yield f"An epoch's last step has fewer samples: {sizes} on average, and the law is fitted to that."


def _of_rule(swept: Swept, rule: Rule) -> RuleResult:
    rows, points, recipe = [], [], swept.loaded.recipe
    seeds = range(recipe.seed, recipe.seed + swept.options.seeds)
    for batch in sorted(swept.options.batch_sizes):
        found = []
        for rate in rates_of(rule, batch, recipe.batch.global_size, swept.base_rate):
            runs = [swept.runs[batch, rate, seed] for seed in seeds]
            # A failed run counts as one that has not reached the target.
            watched = [run for run in runs if run.steps > 0]
            steps, ends = [run.steps for run in watched], [run.reached for run in watched]
            row = BatchRow(
                batch=batch,
                # Of a run that failed before its first evaluation, only the batch is known.
                samples_per_step=min(run.samples_per_step for run in runs),
                lr=rate,
                runs=len(runs),
                reached=sum(run.reached for run in runs),
                steps=time_to_event(steps, ends).median if watched else None,
            )
            found.append((row, runs))
        # The rate with which most runs reach the target and, among those, with the fewest steps.
        row, runs = min(
            found, key=lambda each: (-each[0].reached, math.inf if each[0].steps is None else each[0].steps.middle)
        )
        rows.append(row)
        points += [SweepPoint(run.samples_per_step, run.steps, run.reached) for run in runs if not run.trouble]
    why = why_no_law(points)
    return RuleResult(rule=rule, rows=rows, points=points, law=None if why else fit_batch_law(points), why=why)


def knee_in_words(result: RuleResult) -> str:
    """Describe the position of the knee in one sentence."""
    if result.law is None:
        return f"no knee: {result.why}"
    knee, tried = result.law.critical_batch, [row.samples_per_step for row in result.rows]
    off = f"the law is off by {100 * result.law.worst:.0f} % at most"
    if knee.low == 0 and math.isinf(knee.high):
        return f"knee unknown: the runs bound it on neither side; use more seeds or a wider range of batches; {off}"
    if math.isinf(knee.high):
        return f"knee above {knee.low:.3g} samples: the batches tried do not reach it; {off}"
    if knee.low == 0:
        return f"knee below {knee.high:.3g} samples: the batches tried are all beyond it; {off}"
    outside = "" if min(tried) <= knee.middle <= max(tried) else ", outside the batches tried"
    return f"knee at {knee.middle:.3g} samples ({knee.low:.3g} to {knee.high:.3g}){outside}; {off}"


def sweep_charts(rules: Sequence[RuleResult]) -> tuple[Chart, Chart]:
    """Return charts of samples against steps, and of both against the batch."""
    steps, samples, batch = (Json(title=text, type="log") for text in ("steps", "samples", "samples in a step"))
    trade = Chart(
        title="Samples against steps to the target",
        traces=[each for rule in rules for each in _traces(rule, lambda b, s: (s, b * s))],
        layout={"xaxis": steps, "yaxis": samples},
        description="Each run's samples against its steps, and the fitted hyperbola.",
    )
    tried = sorted({row.batch for rule in rules for row in rule.rows})
    batch |= {"tickmode": "array", "tickvals": tried, "ticktext": [str(each) for each in tried]}
    by_batch = Chart(
        title="Samples to the target by batch",
        traces=[each for rule in rules for each in _traces(rule, lambda b, s: (b, b * s))],
        layout={"xaxis": batch, "yaxis": samples},
        description="Samples to the target by batch size: flat up to the knee, and rising in proportion beyond it.",
    )
    return trade, by_batch


def _traces(rule: RuleResult, place: Callable[[float, float], tuple[float, float]]) -> list[Json]:
    """Return the runs that reached the target, and the law; ``place`` gives x and y for a batch and its steps."""
    reached = [place(each.batch, each.steps) for each in rule.points if each.reached]
    found = [trace("markers", f"{rule.rule}: runs", reached)]
    if rule.law is not None and reached:
        batches = [each.batch for each in rule.points]
        grid = np.geomspace(min(batches), max(batches), 60).tolist()
        found.append(trace("lines", f"{rule.rule}: law", [place(batch, rule.law.steps(batch)) for batch in grid]))
    return found


COLUMNS = ("batch", "rate", "there", "steps", "fewest, most", "samples", "by the law")


def table_rows(rule: RuleResult) -> list[tuple[str, ...]]:
    """Return the rows of a rule's table, with the columns :data:`COLUMNS`."""
    rows: list[tuple[str, ...]] = []
    for row in rule.rows:
        first = (f"{row.batch:,}", f"{row.lr:.3g}", f"{row.reached} of {row.runs}")
        if row.steps is None or not row.reached:
            rows.append((*first, "-", "", "-", ""))
            continue
        # Show the fewest and most steps of the runs that reached it: an interval of three runs would say less.
        steps = [each.steps for each in rule.points if each.reached and each.batch == row.samples_per_step]
        ends = f"{min(steps):,.0f}, {max(steps):,.0f}" if steps else ""
        law = "" if rule.law is None else f"{rule.law.examples(row.samples_per_step):,.0f}"
        middle, samples = (
            "-" if each is None or math.isinf(each) else f"{each:,.0f}" for each in (row.steps.middle, row.samples)
        )
        rows.append((*first, middle, ends, samples, law))
    return rows
