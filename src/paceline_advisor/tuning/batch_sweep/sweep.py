"""Steps and samples that real runs take to a target, by batch size and learning rate rule.

Each run is ``paceline train`` in a scratch directory, until the first evaluation that is as good as asked or until the
longest run allowed is over: in this process, or where several train together, in processes of its own. Finished runs
are written down one by one: a sweep that was killed goes on where it was, and runs that two rules have in common are
made once.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from paceline.command import Log
from paceline.distributed.device import choose_device, describe_machine
from paceline.errors import PacelineError, RecipeError, RunDirectoryError, TrainingError
from paceline.plain_json import load_json
from paceline.recipe.batching import micro_batch_size, with_nearest_ghosts
from paceline.recipe.load import LoadedRecipe, load_recipe, to_yaml
from paceline.recipe.rates import lr_factor
from paceline.recipe.running import Checkpoint
from paceline.recipe.schema import Recipe
from paceline.records.reader import read_plan
from paceline.records.run_directory import RunDirectory, write_text
from paceline.tasks.build import build_task
from paceline.trainer.preparation import plan_run, without_initial_weights
from paceline.world import World
from paceline_advisor.bench.target import Target, TargetAsked, TargetRun, one_run
from paceline_advisor.commands import SweepBatch
from paceline_advisor.launches import check_alone, check_can_watch
from paceline_advisor.tuning.batch_sweep.in_place import run_in_place

RUNS_FILE = "runs.jsonl"
Rule = Literal["constant", "linear", "sqrt", "tuned"]
# Around the square root rule, which lies between the other two; in steps of two a best one is off by 1.4 at most.
_TUNED = (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True, kw_only=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
        batch: Its ``batch.global_size``.
        lr: Its ``optimizer.lr``.
        seed: Its ``seed``.
        reached: Whether it got to the target.
        steps: Optimizer steps until then, on the line between the evaluations before and after; or until its end.
        samples_per_step: On average over an epoch, whose last step may have fewer than the batch.
        evaluations: How often it was looked at; where that is once, it may have got there long before.
        seconds: In training steps.
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
    def key(self) -> tuple[int, float, int]:
        """What it was asked to be."""
        return self.batch, self.lr, self.seed


@dataclass(frozen=True, kw_only=True)
class Swept:
    """What was measured.

    Attributes:
        asked: The command.
        target: What each run is to reach.
        loaded: The recipe.
        base_rate: Its learning rate with its own batch.
        runs: By batch, rate and seed.
    """

    asked: SweepBatch
    target: Target
    loaded: LoadedRecipe
    base_rate: float
    runs: dict[tuple[int, float, int], SweepRun]

    def of(self, rule: Rule, batch: int) -> dict[float, list[SweepRun]]:
        """The runs of a rule with a batch, by rate."""
        recipe = self.loaded.recipe
        rates = rates_of(rule, batch, recipe.batch.global_size, self.base_rate)
        seeds = range(recipe.seed, recipe.seed + self.asked.seeds)
        return {rate: [self.runs[batch, rate, seed] for seed in seeds] for rate in rates}


def sweep(asked: SweepBatch, log: Log = lambda _: None) -> Swept:
    """Make all runs that have not been made yet.

    Raises:
        PacelineError: If the recipe is wrong, also with one of the batches, never evaluates, does not know the metric,
            or the output holds another sweep.
        TrainingError: If the first run cannot be made at all.
    """
    check_alone("sweep-batch")
    if asked.processes > 1:
        check_can_watch()
    loaded = load_recipe(asked.recipe, asked.overrides)
    recipe = _checked(loaded.recipe)
    target = Target.parse(asked.to).of(recipe)
    book = _Book(asked, recipe, target)
    base_rate = recipe.optimizer.lr * lr_factor(recipe, recipe.batch.global_size)
    wanted = list(_wanted(asked, recipe, base_rate))
    _check_plans(asked, recipe, wanted)
    missing = [each for each in wanted if each not in book.runs]
    if len(missing) < len(wanted):
        log(f"{len(wanted) - len(missing)} of {len(wanted)} runs are there already")
    book.open()
    with tempfile.TemporaryDirectory(prefix="paceline-s") as scratch:
        for number, (batch, lr, seed) in enumerate(missing, start=1):
            changed = replace(loaded, recipe=_recipe_of(asked, recipe, batch, lr, seed), origins={})
            try:
                found = _run(asked, target, changed, Path(scratch) / str(number))
            except PacelineError as error:
                if not book.runs:
                    raise
                # What was measured is not lost for what could not be.
                found = _failed(changed.recipe, str(error))
            if not book.runs and found.trouble:
                raise TrainingError(f"the first run failed: {found.trouble}")
            book.add(found)
            log(f"run {number} of {len(missing)}: {in_words(found)}")
    chosen = {key: book.runs[key] for key in wanted}
    return Swept(asked=asked, target=target, loaded=loaded, base_rate=base_rate, runs=chosen)


def in_words(run: SweepRun) -> str:
    """A run as one line."""
    what = f"batch {run.batch}, rate {run.lr:.3g}, seed {run.seed}"
    if run.trouble:
        return f"{what}: {run.trouble}"
    return f"{what}: {run.steps:.0f} steps to the target" if run.reached else f"{what}: not there after {run.steps:.0f}"


def _checked(recipe: Recipe) -> Recipe:
    """The recipe, if batches can be swept with it.

    Raises:
        RecipeError: If it grows its batch, or never evaluates.
    """
    if recipe.batch.growth:
        raise RecipeError("batch.growth changes the batch on the way, and a sweep compares fixed ones; leave it out.")
    if recipe.evaluate.every is None:
        raise RecipeError("evaluate.every=off: a run that is never evaluated reaches no target; give it an interval.")
    return recipe


def _wanted(asked: SweepBatch, recipe: Recipe, base_rate: float) -> Iterator[tuple[int, float, int]]:
    """Seed by seed, so that a sweep that is killed has something of every batch."""
    keys = [
        (batch, rate, recipe.seed + index)
        for index in range(asked.seeds)
        for batch in sorted(asked.batch_sizes)
        for rule in asked.lr_rules
        for rate in rates_of(rule, batch, recipe.batch.global_size, base_rate)
    ]
    yield from dict.fromkeys(keys)


def _check_plans(asked: SweepBatch, recipe: Recipe, wanted: Sequence[tuple[int, float, int]]) -> None:
    """Plan a run with each batch, so that one that cannot be made is known before the first run and not after hours.

    Raises:
        PacelineError: If one cannot be made.
    """
    world = World(world_size=asked.processes, local_world_size=asked.processes)
    machine = describe_machine(choose_device(recipe.parallel.device, world), processes=asked.processes)
    for batch, (lr, seed) in {batch: (lr, seed) for batch, lr, seed in wanted}.items():
        try:
            made = _recipe_of(asked, without_initial_weights(recipe), batch, lr, seed)
            samples = plan_run(made, build_task(made), machine, world).train_samples
        except RecipeError as error:
            raise RecipeError(f"--batch-sizes: no run can be made with {batch}: {error}") from error
        if batch > samples:
            raise RecipeError(
                f"--batch-sizes: a step of {batch:,} samples cannot be made of an epoch of {samples:,}, and its rate "
                "would be that of another batch; give sizes up to that."
            )


def _recipe_of(asked: SweepBatch, recipe: Recipe, batch: int, lr: float, seed: int) -> Recipe:
    cut = with_batch(recipe, batch, asked.processes)
    return replace(
        cut,
        seed=seed,
        optimizer=replace(recipe.optimizer, lr=lr, lr_scaling="none", lr_reference_batch=None),
        # A run that is stopped on the way, to go on later, is none of these.
        train=replace(recipe.train, until=None, duration=asked.longest or recipe.train.duration),
        checkpoint=replace(Checkpoint(), every=None, keep_best=False),
        telemetry=replace(recipe.telemetry, trackers=(), noise_scale=None, mlperf=False),
    )


def with_batch(recipe: Recipe, batch: int, processes: int) -> Recipe:
    """The recipe with another batch, and BatchNorm's groups as near to its own as the micro-batches allow.

    Raises:
        RecipeError: If its micro-batches, or so many processes, do not divide the batch.
    """
    micro = recipe.batch.micro_size
    # A micro-batch that is larger than the batch is the batch.
    sizes = replace(recipe.batch, global_size=batch, micro_size=micro if micro == "auto" else min(micro, batch))
    without = replace(recipe, batch=sizes, model=replace(recipe.model, ghost_batch_norm=None))
    return replace(without, model=with_nearest_ghosts(recipe.model, micro_batch_size(without, processes, {})))


def _failed(recipe: Recipe, trouble: str) -> SweepRun:
    batch = recipe.batch.global_size
    return SweepRun(
        batch=batch,
        lr=recipe.optimizer.lr,
        seed=recipe.seed,
        reached=False,
        steps=0.0,
        samples_per_step=float(batch),
        evaluations=0,
        seconds=0.0,
        trouble=trouble,
    )


def _run(asked: SweepBatch, target: Target, loaded: LoadedRecipe, folder: Path) -> SweepRun:
    recipe = loaded.recipe
    if asked.processes == 1:
        run = run_in_place(loaded, target, folder / "run")
    else:
        each = TargetAsked(recipe=asked.recipe, target=target, processes=asked.processes)
        run = one_run(each, loaded, folder, 0)
    per_step = float(recipe.batch.global_size)
    if run.evaluations:
        plan = read_plan(RunDirectory(folder / "run"))
        per_step = min(per_step, plan["train_samples"] / plan["steps_per_epoch"])
    return SweepRun(
        batch=recipe.batch.global_size,
        lr=recipe.optimizer.lr,
        seed=recipe.seed,
        reached=run.reached,
        steps=steps_to(run, target),
        samples_per_step=per_step,
        evaluations=len(run.evaluations),
        seconds=run.train_seconds,
        trouble=run.trouble,
    )


def steps_to(run: TargetRun, target: Target) -> float:
    """Steps until a run reached the target, or until its last evaluation.

    Between the evaluation that was not good enough and the one that was, the metric is taken to change evenly: to count
    up to the latter would put half an interval on every run.
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


class _Book:
    """Finished runs, on the disk if there is a place for them.

    Raises:
        RunDirectoryError: If the place holds those of another sweep.
    """

    def __init__(self, asked: SweepBatch, recipe: Recipe, target: Target) -> None:
        self.runs: dict[tuple[int, float, int], SweepRun] = {}
        self._path = None if asked.output is None else asked.output / RUNS_FILE
        self._head = {"sweep": _identity(asked, recipe), "target": f"{target.metric}={target.value:g}"}
        if self._path is not None and self._path.exists():
            self._read(self._path)

    def _read(self, path: Path) -> None:
        # The last line of a killed sweep may be a part of one.
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        try:
            head, *rows = [load_json(line) for line in lines] or [self._head]
            told = head.get("target")
            runs = [SweepRun(**row) for row in rows]
        except (ValueError, TypeError, AttributeError) as error:
            raise RunDirectoryError(f"'{path}' is not what sweep-batch has written ({error}); remove it.") from error
        if head != self._head:
            raise RunDirectoryError(
                f"'{path}' holds the runs of another sweep (to {told}, or of a recipe that was changed "
                "since); name another --output, or remove it."
            )
        # One that failed is tried again: what was in its way may be gone.
        self.runs = {run.key: run for run in runs if not run.trouble}

    def open(self) -> None:
        """Begin the file, without what a killed sweep may have left at its end."""
        if self._path is not None:
            rows = [self._head, *(asdict(run) for run in self.runs.values())]
            write_text(self._path, "".join(json.dumps(row) + "\n" for row in rows))

    def add(self, run: SweepRun) -> None:
        """Write a run down."""
        self.runs[run.key] = run
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(run)) + "\n")


def _identity(asked: SweepBatch, recipe: Recipe) -> str:
    """What two sweeps must have in common so that one may use the other's runs."""
    plain: dict[str, Any] = {"recipe": to_yaml(recipe), "processes": asked.processes, "longest": str(asked.longest)}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def rates_of(rule: Rule, batch: int, reference_batch: int, reference_rate: float) -> tuple[float, ...]:
    """Learning rates that a rule tries with a batch; one but for ``tuned``.

    Args:
        rule: How the rate follows the batch.
        batch: Samples in a step.
        reference_batch: The recipe's own.
        reference_rate: The rate with that.
    """
    ratio = batch / reference_batch
    factors = {"constant": (1.0,), "linear": (ratio,), "sqrt": (math.sqrt(ratio),)}
    tried = factors.get(rule, tuple(factor * math.sqrt(ratio) for factor in _TUNED))
    # Rounded, so that what two rules have in common is one rate, and is run once.
    return tuple(float(f"{reference_rate * factor:.6g}") for factor in tried)
