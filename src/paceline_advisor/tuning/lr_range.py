"""Learning rate range tests (Smith 2017): the steps, the result, the page."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import numpy as np

from paceline.command import Log
from paceline.data.batch import Batch
from paceline.data.loaders.pytorch import explain_worker_deaths
from paceline.distributed.environment import read_launch
from paceline.errors import RecipeError, TrainingError, did_you_mean
from paceline.host.world import World
from paceline.learning.evidence import LossFit
from paceline.learning.losses import LossWatcher, Parts, described, merged
from paceline.pages.page import Chart, Table, Text
from paceline.pages.shown import Shown
from paceline.parsing.units import Duration, counted, format_count
from paceline.plan import Plan
from paceline.plan.rates import LearningRate, Schedules, lr_factor
from paceline.recipe.load import LoadedRecipe, Overrides, load_recipe, stored_recipe, to_tree, to_yaml
from paceline.recipe.schema import Recipe
from paceline.trainer.listeners import Listener
from paceline.trainer.process_settings import restore_globals
from paceline.trainer.run_records import report_broken
from paceline.trainer.step import train_step
from paceline.trainer.subject import Options, TaskMaker
from paceline.trainer.train import opened_run
from paceline.trainer.warmup import check_first_batch, warm_up
from paceline_advisor import picked
from paceline_advisor.apply import QUIET, SILENT, with_values, write_new
from paceline_advisor.bench.interleaved import without_growth
from paceline_advisor.commands import FindLr, Sweep
from paceline_advisor.formulas.learning_rate import (
    MEDIAN,
    Suggestion,
    lowest_between,
    noise,
    pooled,
    smoothed,
    suggest,
    trough_steps,
)
from paceline_advisor.traces import trace

# fp16's loss scale decreases by skipping steps, which use up batches.
MOST_SKIPPED = 20
# Steps of each test of a second try, after tests that told nothing.
_MORE_STEPS = 400
# More tests are taken if the noise is more than this share of the loss's fall. More steps would move the votes.
_NOISY, _MORE_SEEDS = 0.02, 9
# A rising rate ruins trained weights before it has improved them, so rates from the suggested one up are trained.
_RATE_FACTOR, _MOST_RATES = 3.0, 5


def as_tested(recipe: Recipe, steps: int, *, world_size: int) -> Recipe:
    """Return the recipe of a range test: as at the start of training, and without work between steps.

    Args:
        recipe: The recipe.
        steps: Steps of the test.
        world_size: Number of processes.
    """
    values = {
        "model.unfreeze": {},
        "model.freeze_after": {},
        "schedule": QUIET["schedule"],
        "train.duration": Duration(steps + MOST_SKIPPED, "steps"),
        "train.ema": None,
        "evaluate.every": None,
        "evaluate.patience": None,
        **SILENT,
    }
    return with_values(without_growth(recipe, world_size), values)


class _LossListener(Listener):
    """Keeps what the loss functions of a step are given."""

    def __init__(self) -> None:
        self.watcher = LossWatcher()

    def around_forward(self, model: Callable[..., Any], batch: Batch) -> AbstractContextManager[None]:
        """Watch a micro-batch's loss."""
        return self.watcher.around(model)


Ending = Literal["highest", "diverged", "not_finite", "signal"]
_PROGRESS_LINES = 10


@dataclass(kw_only=True)
class SweepSteps:
    """The steps of a range test.

    Attributes:
        rates: Learning rate of each step.
        losses: Mean loss over each step's global batch, before its update; all finite.
        given: What the loss function of each step was given, over all processes.
        skipped: Steps that fp16 skipped; each was repeated with the next batch.
        ending: Why the test ended.
    """

    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    given: list[Parts] = field(default_factory=list)
    skipped: int = 0
    ending: Ending = "highest"


def take_steps(
    loaded: LoadedRecipe,
    options: Options,
    sweep: Sweep,
    log: Callable[[str], None],
    rates: LearningRate | None = None,
) -> tuple[SweepSteps, Plan, str | None]:
    """Train the steps of a range test; collective: every rank must call this.

    Every process has the same losses, and ends at the same step.

    Args:
        loaded: The recipe.
        options: Where and how to run it.
        sweep: The settings of the test.
        log: Receives progress messages.
        rates: Learning rate of each step, instead of the rising one.

    Returns:
        The steps, the plan, and the name of the signal that asked to stop; None without one.
    """
    steps_taken = SweepSteps()
    with opened_run(loaded, options) as run:
        # Momentum and weight decay keep the optimizer's initial values, which are those of the recipe's first step.
        if rates is None:
            total = sweep.planned_steps - 1
            rates = LearningRate(name=sweep.shape, peak=sweep.lowest, end=sweep.highest, total_steps=total)
        run.schedules = Schedules(learning_rate=rates)
        run.listeners.append(listener := _LossListener())
        with run.watchdog.watching(), explain_worker_deaths():
            batches = check_first_batch(run, warm_up(run, run.train_batches()))
            run.clock.start()
            ending: Ending | None = None
            while ending is None:
                rate = rates(run.progress.step)
                stepped = train_step(run, batches)
                run.progress.advance(stepped=stepped)
                run.heartbeat.enter("record")
                # The host waits for the device in each step: the next step depends on the loss.
                drained = run.window.drain()
                report_broken(run, drained.broken)
                loss, given = drained.loss, listener.watcher.drain()
                run.clock.end_step(run.plan.step_samples(run.progress.position - 1), run.load)
                run.clock.drain()
                if loss is not None and math.isfinite(loss):
                    steps_taken.rates.append(rate)
                    steps_taken.losses.append(loss)
                    steps_taken.given.append(given)
                steps_taken.skipped = run.progress.skipped
                # Whether to stop is a collective on some devices: each process must ask equally often.
                is_stopped = run.strategy.agreed(run.control_flags()).stop
                repeats = loss is None and run.precision.scaler is not None
                ending = "signal" if is_stopped else _ending(sweep, steps_taken, loss, repeats=repeats)
                if loss is not None and len(steps_taken.losses) % max(1, sweep.planned_steps // _PROGRESS_LINES) == 0:
                    log(f"step {len(steps_taken.losses)} of {sweep.planned_steps}: rate {rate:.3g}, loss {loss:.4g}")
        steps_taken.ending = ending
        # After this, no process writes to the folder that the first one is about to remove.
        run.recorder.flush()
        by_rank = run.collectives.gather(steps_taken.given)
        steps_taken.given = [merged(parts) for parts in zip(*by_rank, strict=True)]
        return steps_taken, run.plan, run.stop.signal_name


def _ending(sweep: Sweep, steps_taken: SweepSteps, loss: float | None, *, repeats: bool) -> Ending | None:
    """Return why the test ends here, if it does; the same on all processes, since all have the same losses.

    Args:
        sweep: The settings.
        steps_taken: The steps so far.
        loss: The loss of the last one; None if it was skipped.
        repeats: Whether it is repeated: fp16 retries the rate at a lower scale, but not forever.
    """
    if repeats:
        return "not_finite" if steps_taken.skipped >= MOST_SKIPPED else None
    if loss is None or not math.isfinite(loss):
        return "not_finite"
    average = smoothed(steps_taken.losses, sweep.smoothing)
    if average[-1] > sweep.divergence * min(average):
        return "diverged"
    return "highest" if len(steps_taken.losses) >= sweep.planned_steps else None


# More digits would not be reproducible with another seed.
_DIGITS = 3
# If the lowest loss comes after this fraction of the steps, it is at the upper end.
_NEAR_THE_END = 0.9
# A suggestion that is a smaller fraction of the recipe's rate gets a note.
_FAR = 0.001
_ENDINGS: Mapping[Ending, str] = {
    "highest": "all steps were taken",
    "diverged": "the loss diverged",
    "not_finite": "the loss or the gradient became infinite or NaN",
}


class RangeTestSettings(TypedDict, total=False):
    """Settings of a range test: see :class:`~paceline_advisor.commands.Sweep`."""

    lowest: float
    highest: float
    steps: int | None
    seeds: int | None
    shape: Literal["exponential", "linear"]
    smoothing: float
    divergence: float


@dataclass(frozen=True, kw_only=True)
class RangeTest:
    """The result of range tests.

    Attributes:
        name: Name of the recipe.
        recipe: The tested recipe.
        sweep: The settings of the tests.
        facts: Facts of the run: device, precision, processes, sizes.
        rates: Learning rate of each step.
        curves: Mean training loss over each step's global batch, before its update, in each test.
        losses: The median over the tests, until more than half of them have ended.
        averages: These losses, smoothed.
        ending: Why the test of these losses ended: ``highest``, ``diverged`` or ``not_finite``.
        skipped: Steps that fp16 skipped; each was repeated with the next batch.
        suggestions: By rule: median, trough, valley, steepest, minimum, slide.
        notes: What to know before using them.
        rule: The rule that the user chose.
        applied: What was written to the requested file, in words; empty if none was requested.
    """

    name: str
    recipe: Recipe
    sweep: Sweep
    facts: Mapping[str, Any]
    rates: tuple[float, ...]
    curves: tuple[tuple[float, ...], ...]
    losses: tuple[float, ...]
    averages: tuple[float, ...]
    ending: Ending
    skipped: int
    suggestions: Mapping[str, Suggestion]
    notes: tuple[str, ...]
    rule: str = MEDIAN
    applied: str = ""

    @property
    def ending_in_words(self) -> str:
        """Why the test ended."""
        return _ENDINGS[self.ending]

    def suggestion(self, rule: str = MEDIAN) -> Suggestion:
        """Return a rule's suggestion.

        Raises:
            RecipeError: If there is no such rule.
        """
        if rule not in self.suggestions:
            raise RecipeError(
                f"there is no suggestion '{rule}'.{did_you_mean(rule, self.suggestions)} Choose one of: "
                f"{', '.join(self.suggestions)}."
            )
        return self.suggestions[rule]

    def lr(self, rule: str = MEDIAN) -> float:
        """Return ``optimizer.lr`` by a rule, to three digits; with a scaling rule, before scaling.

        Raises:
            RecipeError: If there is no such rule, or the curve has no such point, with the reason.
        """
        found = self.suggestion(rule)
        if found.lr is None:
            raise RecipeError(f"the range test suggests no learning rate by '{rule}': {found.why_not}.")
        return self._unscaled(found.lr)

    def _unscaled(self, rate: float) -> float:
        return float(f"{rate / self.facts['lr_factor']:.{_DIGITS}g}")

    def _cell(self, rule: str) -> str:
        """Return a rule's rate in words, with the range of its votes."""
        found = self.suggestion(rule)
        if found.lr is None:
            return "none"
        votes = [f"{self._unscaled(each):g}" for each in (found.low, found.high) if each is not None]
        return f"{self.lr(rule):g}" + f" ({' to '.join(votes)})" * bool(votes)

    def improved(self, rule: str = MEDIAN) -> str:
        """Return the recipe with the learning rate of a rule, as YAML with a comment that names the rule.

        Raises:
            RecipeError: If there is no such rule, or the curve has no such point.
        """
        lr, before, why = self.lr(rule), self.recipe.optimizer.lr, self.suggestion(rule).rule
        head = f"# {self.name}, as suggested by `paceline find-lr`:\n"
        head += f"#   optimizer.lr={lr:g} instead of {before:g} ({rule}: {why})\n"
        return head + to_yaml(stored_recipe(to_tree(self.recipe), "the recipe", {"optimizer.lr": lr}))

    def to_json(self) -> dict[str, Any]:
        """Return the result as one JSON object."""
        return {
            "recipe": self.name,
            "settings": asdict(self.sweep) | {"steps": self.sweep.planned_steps, "seeds": len(self.curves)},
            **self.facts,
            "stop": {"reason": self.ending, "steps": len(self.rates), "lr": self.rates[-1]},
            "skipped_steps": self.skipped,
            "suggestions": {name: asdict(each) for name, each in self.suggestions.items()},
            "notes": list(self.notes),
            "lrs": list(self.rates),
            "losses": list(self.losses),
            "smoothed": list(self.averages),
            "curves": [list(each) for each in self.curves],
        }

    def __paceline__(self) -> Shown:
        """Show the test, its curve, the suggestions and the notes; on the page, the method and the sources too."""
        facts, sweep = self.facts, self.sweep
        several = f", {facts['world_size']} processes" if facts["world_size"] > 1 else ""
        rows = [
            (f"{name}{' *' * (name == self.rule)}", self._cell(name), each.why_not or each.rule)
            for name, each in self.suggestions.items()
        ]
        sources = Table(
            columns=("rule", "source"),
            rows=[(name, each.source) for name, each in self.suggestions.items()],
            caption="Where the rules come from",
        )
        return Shown(
            title=f"Range test of {self.name} on {facts['device_name']}{several}",
            blocks=[
                {
                    "rates": f"{sweep.lowest:g} to {sweep.highest:g}, {sweep.shape}, "
                    f"{counted(len(self.curves), 'seed')}, {format_count(sweep.planned_steps)} steps of "
                    f"{format_count(facts['global_batch_size'])} samples, "
                    f"micro-batches of {format_count(facts['micro_batch_size'])}, {facts['precision']}",
                    "ended": f"after {format_count(len(self.rates))} steps at {self.rates[-1]:.3g}: "
                    f"{self.ending_in_words}",
                    "loss": f"{sparkline(self)}  {self.averages[0]:.3g} at first, {min(self.averages):.3g} at best",
                    "smoothing": f"{sweep.smoothing:g}; ends at {sweep.divergence:g} times the best smoothed loss",
                    "now": f"{facts['optimizer']}, optimizer.lr={facts['optimizer_lr']:g}",
                },
                _chart(self),
                Table(columns=("suggestion", "optimizer.lr", "why"), rows=rows, caption="Suggested learning rates"),
                *(f"  note: {note}" for note in self.notes),
                *([self.applied] if self.applied else []),
            ],
            on_page=[Text(_METHOD), sources],
            ok=self.suggestion(self.rule).lr is not None or "",
        )


def find_lr(
    recipe: str | Path,
    *,
    overrides: Overrides = (),
    task: TaskMaker | None = None,
    quiet: bool = False,
    **settings: Unpack[RangeTestSettings],
) -> RangeTest:
    """Train a few steps of a recipe with a rising learning rate, and suggest a rate from the loss curve.

    It joins an existing world (torchrun, Slurm), or else trains in this process, in a temporary directory that is
    removed afterwards. Random states, torch's settings, signal handlers and environment variables are restored, also
    after an error.

    Args:
        recipe: A shipped recipe's name, the path of a YAML file, or a run directory, whose recipe is tested.
        overrides: ``{"batch.global_size": 128}`` or ``["batch.global_size=128"]``.
        task: A :class:`paceline.Task` subclass, or any function from a recipe to a task, instead of the one the recipe
            names.
        quiet: Print no progress.
        settings: ``lowest``, ``highest`` (learning rates), ``steps``, ``seeds``, ``shape`` (``exponential`` or
            ``linear``), ``smoothing``, ``divergence``.

    Raises:
        PacelineError: For every mistake in the recipe, the data or the settings.
        TrainingError: If even the first loss is not finite, or if a stop was requested.
        KeyboardInterrupt: For Ctrl-C in a single process.
    """
    sweep = Sweep(**settings)
    log = (lambda _: None) if quiet else print
    return range_test(load_recipe(recipe, overrides), sweep, task=task, log=log)


def measure(options: FindLr, log: Log) -> RangeTest:
    """Run the range test of `paceline find-lr`, and write the recipe with the suggestion.

    Raises:
        PacelineError: For every mistake in the recipe or the data.
        TrainingError: If even the first loss is not finite, or if a stop was requested.
        KeyboardInterrupt: For Ctrl-C in a single process.
    """
    rule = options.suggestion
    test = replace(range_test(load_recipe(options.recipe, options.overrides), options.sweep, log=log), rule=rule)
    if options.apply is None or not read_launch(os.environ).world.is_first:
        return test
    if test.suggestion(rule).lr is None:
        return replace(test, applied=f"{options.apply} was not written: there is no suggestion by '{rule}'")
    write_new(options.apply, test.improved(rule))
    return replace(test, applied=f"{options.apply}: the recipe with optimizer.lr={test.lr(rule):g}")


def range_test(
    loaded: LoadedRecipe, sweep: Sweep, *, task: TaskMaker | None = None, log: Callable[[str], None] = lambda _: None
) -> RangeTest:
    """Run a range test of a recipe; collective: every rank must call this.

    Args:
        loaded: The recipe.
        sweep: The settings of the test.
        task: Creates the task, instead of the one the recipe names.
        log: Receives progress messages, on the first process.

    Raises:
        PacelineError: For every mistake in the recipe or the data.
        TrainingError: If even the first loss is not finite, or if a stop was requested.
        KeyboardInterrupt: For Ctrl-C in a single process.
    """
    report = log if read_launch(os.environ).world.is_first else lambda _: None
    with_seeds = partial(_tests, loaded, task, report)
    plan, tests = with_seeds(sweep, range(sweep.planned_seeds))
    found = _result(loaded, sweep, plan, tests)
    if sweep.steps is None and found.suggestion().lr is None:
        report(f"{found.suggestion().why_not}: once more with {_MORE_STEPS} steps")
        sweep = replace(sweep, steps=_MORE_STEPS)
        plan, tests = with_seeds(sweep, range(sweep.planned_seeds))
        found = _result(loaded, sweep, plan, tests)
    noises = [noise(each.losses, steps=sweep.planned_steps) for each in tests]
    if sweep.seeds is None and found.suggestion().lr is not None and statistics.median(noises) > _NOISY:
        report(f"the loss is noisy: {_MORE_SEEDS} seeds instead of {sweep.planned_seeds}")
        tests += with_seeds(sweep, range(sweep.planned_seeds, _MORE_SEEDS))[1]
        found = _result(loaded, replace(sweep, seeds=_MORE_SEEDS), plan, tests)
    model = loaded.recipe.model
    if found.suggestion().lr is not None and (model.initialize_from is not None or model.pretrained):
        report(f"trained weights: trainings of {sweep.planned_steps} steps with several rates")
        found = _best_trained(found, lambda rates: with_seeds(sweep, range(sweep.planned_seeds), rates)[1], report)
    return found


def _best_trained(
    found: RangeTest, train: Callable[[LearningRate], Sequence[SweepSteps]], log: Callable[[str], None]
) -> RangeTest:
    """Train with rates from the suggested one up as long as the last losses are lower, and suggest the best."""
    chosen, steps = found.suggestion(), found.sweep.planned_steps
    assert chosen.lr is not None
    last, rates, losses = max(1, steps // 10), list[float](), list[float]()
    while len(rates) < _MOST_RATES and (not losses or losses[-1] == min(losses)):
        rates.append(chosen.lr * _RATE_FACTOR ** len(rates))
        tests = train(LearningRate(name="cosine", peak=rates[-1], total_steps=steps, warmup_steps=steps // 10))
        ended = any(len(each.losses) < steps for each in tests)
        losses.append(math.inf if ended else statistics.mean(loss for each in tests for loss in each.losses[-last:]))
        outcome = f"loss {losses[-1]:.4g}" if math.isfinite(losses[-1]) else "diverged"
        log(f"trained with rate {rates[-1]:.3g}: {outcome}")
    if not any(map(math.isfinite, losses)):
        tried = f"{rates[0]:.3g} to {rates[-1]:.3g}"
        why_not = f"cannot tell, since the trainings with rates from {tried} diverged; try a lower --highest"
        trained = replace(chosen, lr=None, low=None, high=None, why_not=why_not)
        return replace(found, suggestions={**found.suggestions, MEDIAN: trained})
    best = lowest_between(rates, losses)
    words = (
        f"the lowest loss after trainings with {len(rates)} rates, from the tests' one up; in brackets a third and 3 x"
    )
    trained = replace(chosen, lr=best, low=best / _RATE_FACTOR, high=best * _RATE_FACTOR, rule=words)
    return replace(found, suggestions={**found.suggestions, MEDIAN: trained})


def _tests(
    loaded: LoadedRecipe,
    task: TaskMaker | None,
    log: Callable[[str], None],
    sweep: Sweep,
    seeds: Sequence[int],
    rates: LearningRate | None = None,
) -> tuple[Plan, list[SweepSteps]]:
    """Run a test for each seed, counted from the recipe's."""
    world = read_launch(os.environ).world
    recipe = as_tested(loaded.recipe, sweep.planned_steps, world_size=world.world_size)
    tests = []
    for number, seed in enumerate(seeds, start=1):
        test_log = partial(_log_of_test, log, f"test {number} of {len(seeds)}") if len(seeds) > 1 else log
        with restore_globals(recipe.parallel.device), _scratch(world) as run_dir:
            tested = LoadedRecipe(replace(recipe, seed=recipe.seed + seed), loaded.name)
            taken, plan, stop = take_steps(tested, Options(run_dir=run_dir, task=task), sweep, test_log, rates)
        if taken.ending == "signal":  # which the run treated as a stop request
            if world.world_size == 1 and stop == signal.SIGINT.name:
                raise KeyboardInterrupt
            raise TrainingError(
                f"the range test was stopped by {stop or 'another process'} after {len(taken.losses)} steps; it has no "
                "result, and changed nothing."
            )
        if not taken.losses:
            raise TrainingError(
                "the loss of the first step is not finite, before any rate has had an effect: check the data, the "
                "network and the precision (train.precision)."
            )
        tests.append(taken)
    return plan, tests


def _log_of_test(log: Callable[[str], None], test: str, line: str) -> None:
    log(f"{test}, {line}")


def _result(loaded: LoadedRecipe, sweep: Sweep, plan: Plan, tests: Sequence[SweepSteps]) -> RangeTest:
    steps, facts = sweep.planned_steps, _facts(plan, loaded.recipe)
    rates, curves = max((each.rates for each in tests), key=len), [each.losses for each in tests]
    losses = pooled(curves)
    why_not = _nothing_learned(tests, losses, steps)
    suggestions = suggest(rates, curves, smoothing=sweep.smoothing, steps=steps, why_not=why_not)
    ending = next(each.ending for each in tests if len(each.losses) == len(losses))
    averages = smoothed(losses, sweep.smoothing)
    return RangeTest(
        name=loaded.name,
        recipe=loaded.recipe,
        sweep=sweep,
        facts=facts,
        rates=tuple(rates[: len(losses)]),
        curves=tuple(map(tuple, curves)),
        losses=tuple(losses),
        averages=tuple(averages),
        ending=ending,
        skipped=sum(each.skipped for each in tests),
        suggestions=suggestions,
        notes=tuple(_notes(loaded.recipe, sweep, ending, averages, facts, suggestions[MEDIAN])),
    )


def _nothing_learned(tests: Sequence[SweepSteps], losses: Sequence[float], steps: int) -> str:
    """Return why the lowest losses are no better than those of an answer that ignores the input; empty if they are."""
    with contextlib.suppress(ValueError):  # too few steps
        lowest = trough_steps(losses, steps=steps)
        figures = described(merged([given for each in tests for given in each.given[lowest]]))
        fits = [LossFit(figures=each) for each in figures.values() if each]
        if fits and not any(each.is_above_chance for each in fits):
            return f"cannot tell, since nothing was learned: {fits[0]} at the lowest losses; try more --steps"
    return ""


@contextlib.contextmanager
def _scratch(world: World) -> Iterator[Path | None]:
    """Yield a directory for the run, which the first process creates and removes; None on the others."""
    if not world.is_first:
        yield None
        return
    # All hosts must see it, and the current directory is more likely to be shared than /tmp.
    place = None if world.world_size == world.local_world_size else Path.cwd()
    with tempfile.TemporaryDirectory(prefix="paceline-lr-", dir=place, ignore_cleanup_errors=True) as folder:
        yield Path(folder) / "run"


def _facts(plan: Plan, recipe: Recipe) -> dict[str, Any]:
    return {
        **picked(plan, "device", "device_name", "precision", "strategy", "world_size"),
        **picked(plan, "global_batch_size", "micro_batch_size", "steps_per_epoch"),
        "optimizer": recipe.optimizer.name,
        "optimizer_lr": recipe.optimizer.lr,
        "lr_factor": lr_factor(recipe, min(plan.global_batch_size, plan.train_samples)),
    }


def _notes(
    recipe: Recipe,
    sweep: Sweep,
    ending: Ending,
    averages: Sequence[float],
    facts: Mapping[str, Any],
    chosen: Suggestion,
) -> Iterator[str]:
    if chosen.lr is None:
        yield (
            "without a suggestion the recipe's own optimizer.lr stays the best guess; more --steps, or a higher "
            "--highest, may show a fall that these steps do not"
        )
    elif chosen.lr < _FAR * (own := facts["optimizer_lr"] * facts["lr_factor"]):
        yield (
            f"the suggestion is {own / chosen.lr:,.0f} times below the recipe's own rate: with trained weights the "
            "loss hardly falls, and the first batches decide where; try more --steps or another seed before using it"
        )
    if ending == "highest" and averages.index(min(averages)) >= _NEAR_THE_END * len(averages):
        yield f"the loss was lowest near the highest rate, {sweep.highest:g}: there may be better ones above it"
    if facts["lr_factor"] != 1:
        yield (
            f"rates are those of the steps; optimizer.lr is multiplied by {facts['lr_factor']:g} "
            f"(lr_scaling={recipe.optimizer.lr_scaling}) to get them, and is written before that"
        )
    if recipe.schedule.warmup.value:
        yield "the test has no warm-up; a peak rate reached with schedule.warmup may be higher"
    if recipe.batch.growth:
        yield "the initial batch size was tested, not the sizes of batch.growth"
    if recipe.model.unfreeze:
        yield "parameters in model.frozen were frozen in all steps; model.unfreeze applies later"
    if recipe.model.freeze_after:
        yield "parameters in model.freeze_after were trained in all steps"
    if recipe.data.progressive.start_size is not None:
        yield "images had the first size of data.progressive, unless the test went through its epochs"


_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 40
_METHOD = (
    "The recipe was trained for some steps from its initial weights, with a learning rate that rises at each step "
    "(Smith 2015), once for each seed. A step's loss is measured before its update, over all its samples. The rules "
    "look at the median loss of the tests, without the first tenth and the last five. The suggestion is the middle of "
    "the rates at which 80, 90 and 100 % of the loss's fall are done, with the lowest and the highest of such rates of "
    "any test. From trained weights, this rate and higher ones are also trained, with a warm-up and a cosine, and the "
    "suggestion is where the last losses are lowest. The other rules have fastai's definitions. A suggested rate is a "
    "starting point, not the optimum: only full training shows what works to the end of a run."
)


def sparkline(found: RangeTest) -> str:
    """Draw the smoothed loss over the steps in one line; diverged values are clipped at the first loss."""
    curve = found.averages
    count = min(_WIDTH, len(curve))
    shown = [curve[index * (len(curve) - 1) // max(1, count - 1)] for index in range(count)]
    low = min(shown)
    scale = (len(_BLOCKS) - 1) / max(shown[0] - low, 1e-12)
    return "".join(_BLOCKS[min(len(_BLOCKS) - 1, round((loss - low) * scale))] for loss in shown)


def _chart(found: RangeTest) -> Chart:
    rates, averages = list(found.rates), found.averages
    lowest = min(averages)
    # Diverged values would flatten the relevant part.
    top = averages[0] + 0.5 * (averages[0] - lowest) + 1e-9
    points = list(zip(rates, found.losses, strict=True))
    traces = [
        trace("markers", "loss of each step", points, marker={"size": 4, "opacity": 0.5}),
        trace("lines", "smoothed", zip(rates, averages, strict=True), line={"dash": "solid"}),
    ]
    symbols = ("circle-open", "star", "diamond", "triangle-up", "square", "x")
    for symbol, (name, each) in zip(symbols, found.suggestions.items(), strict=True):
        if each.lr is not None:
            marker = {"size": 20 if name == MEDIAN else 12, "symbol": symbol}
            place = each.lr, float(np.interp(each.lr, rates, averages))
            traces.append(trace("markers", name, [place], marker=marker))
    # Values above the axis are drawn at its edge: how a test ended is part of the result.
    if above := [(rate, top, loss) for rate, loss in points if loss > top]:
        traces.append(
            trace(
                "markers",
                "loss above the axis",
                above,
                customdata=[loss for *_, loss in above],
                hovertemplate="rate %{x:.3g}: loss %{customdata:.3g}<extra></extra>",
                marker={"size": 8, "symbol": "triangle-up-open"},
                cliponaxis=False,
            )
        )
    kind = "log" if found.sweep.shape == "exponential" else "linear"
    return Chart(
        title="Training loss as the learning rate rises",
        traces=traces,
        layout={
            "xaxis": {"title": "learning rate", "type": kind, "exponentformat": "power"},
            "yaxis": {"title": "loss", "range": [min(lowest, *found.losses) - 0.05 * abs(lowest), top]},
            "height": 420,
        },
        description=f"The smoothed loss goes from {averages[0]:.3g} to {lowest:.3g} at its lowest, at a rate of "
        f"{rates[averages.index(lowest)]:.3g}; {found.ending_in_words}.",
        wide=True,
    )
