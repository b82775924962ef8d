"""How is a range test done, and what does it leave behind? Nothing, but its result."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from paceline.distributed.environment import read_launch
from paceline.errors import RecipeError, TrainingError, did_you_mean
from paceline.recipe.load import LoadedRecipe, Overrides, load_recipe, stored_recipe, to_tree, to_yaml
from paceline.recipe.rates import lr_factor
from paceline.recipe.schema import Recipe
from paceline.trainer.process_settings import restore_globals
from paceline.trainer.run import Run
from paceline.trainer.train import Options, TaskMaker, opened_run
from paceline.world import World
from paceline_advisor.formulas.lr_range import MEDIAN, Suggestion, smoothed, suggest
from paceline_advisor.tuning.lr_range.steps import Ending, Taken, check_any, take_steps
from paceline_advisor.tuning.lr_range.sweep import Sweep, as_tested

DEFAULT = MEDIAN
# More digits than the next seed would agree with.
_DIGITS = 3
# From this share of the steps on, the lowest loss lies at the upper end.
_NEAR_THE_END = 0.9
# A suggestion that is a smaller part of the recipe's own rate is told of.
_FAR = 0.001
_ENDINGS: Mapping[Ending, str] = {
    "highest": "all steps were taken",
    "diverged": "the loss diverged",
    "not_finite": "the loss, or the gradient, became infinite or no number",
}


class Settings(TypedDict, total=False):
    """How a range test is done: see :class:`~paceline_advisor.tuning.lr_range.sweep.Sweep`."""

    lowest: float
    highest: float
    steps: int
    shape: Literal["exponential", "linear"]
    smoothing: float
    divergence: float


@dataclass(frozen=True, kw_only=True)
class RangeTest:
    """The result of a range test.

    Attributes:
        name: Of the recipe.
        recipe: The recipe that was asked about.
        sweep: How it was tested.
        facts: What the run said of itself: device, precision, processes, sizes.
        rates: Learning rate of each step.
        losses: Mean training loss over each step's global batch, before its update.
        averages: The losses, smoothed.
        ending: ``highest``, ``diverged`` or ``not_finite``.
        skipped: Steps that fp16 left out, and took with the next batch.
        suggestions: By rule: median, trough, valley, steepest, minimum, slide.
        notes: What a reader must know to use them.
    """

    name: str
    recipe: Recipe
    sweep: Sweep
    facts: Mapping[str, Any]
    rates: tuple[float, ...]
    losses: tuple[float, ...]
    averages: tuple[float, ...]
    ending: Ending
    skipped: int
    suggestions: Mapping[str, Suggestion]
    notes: tuple[str, ...]

    @property
    def ending_in_words(self) -> str:
        """Why there are no more steps."""
        return _ENDINGS[self.ending]

    def suggestion(self, rule: str = DEFAULT) -> Suggestion:
        """What a rule says.

        Raises:
            RecipeError: If there is no such rule.
        """
        if rule not in self.suggestions:
            raise RecipeError(
                f"there is no suggestion '{rule}'.{did_you_mean(rule, self.suggestions)} Choose one of: "
                f"{', '.join(self.suggestions)}."
            )
        return self.suggestions[rule]

    def lr(self, rule: str = DEFAULT) -> float:
        """What ``optimizer.lr`` becomes by a rule, to three digits: under a scaling rule, before it.

        Raises:
            RecipeError: If the curve has no such point, with the reason.
        """
        found = self.suggestion(rule)
        if found.lr is None:
            raise RecipeError(f"the range test suggests no learning rate by '{rule}': {found.why_not}.")
        return float(f"{found.lr / self.facts['lr_factor']:.{_DIGITS}g}")

    def improved(self, rule: str = DEFAULT) -> str:
        """The recipe with that learning rate, as YAML that says where it comes from.

        Raises:
            RecipeError: If the curve has no such point.
        """
        lr, before, why = self.lr(rule), self.recipe.optimizer.lr, self.suggestion(rule).rule
        head = f"# {self.name}, with what `paceline find-lr` suggested:\n"
        head += f"#   optimizer.lr={lr:g} in place of {before:g}  ({rule}: {why})\n"
        return head + to_yaml(stored_recipe(to_tree(self.recipe), "the recipe", {"optimizer.lr": lr}))

    def to_json(self) -> dict[str, Any]:
        """The result as one JSON object."""
        return {
            "recipe": self.name,
            "settings": asdict(self.sweep),
            **self.facts,
            "stop": {"reason": self.ending, "steps": len(self.rates), "lr": self.rates[-1]},
            "skipped_steps": self.skipped,
            "suggestions": {name: asdict(each) for name, each in self.suggestions.items()},
            "notes": list(self.notes),
            "lrs": list(self.rates),
            "losses": list(self.losses),
            "smoothed": list(self.averages),
        }


def find_lr(
    recipe: str | Path,
    *,
    overrides: Overrides = (),
    task: TaskMaker | None = None,
    quiet: bool = False,
    **settings: Unpack[Settings],
) -> RangeTest:
    """Train a few steps of a recipe with a learning rate that rises, and suggest one from how the loss goes.

    Joins the world it finds (torchrun, Slurm), else trains in this process; in a temporary directory, which is gone
    afterwards. Random states, torch's settings, signal handlers and environment variables are afterwards what they
    were, also after an error.

    Args:
        recipe: A shipped recipe's name, the path of a YAML file, or a run directory, whose recipe is tested.
        overrides: ``{"batch.global_size": 128}`` or ``["batch.global_size=128"]``.
        task: A :class:`paceline.Task` subclass, or any function from a recipe to a task, instead of the one the recipe
            names.
        quiet: Say nothing meanwhile.
        settings: ``lowest``, ``highest`` (learning rates), ``steps``, ``shape`` (``exponential`` or ``linear``),
            ``smoothing``, ``divergence``.

    Raises:
        PacelineError: For every mistake in the recipe, the data or the settings.
        TrainingError: If not even the first loss is a number.
    """
    sweep = Sweep(**settings)
    say = (lambda _: None) if quiet else print
    return range_test(load_recipe(recipe, overrides), sweep, task=task, say=say)


def range_test(
    loaded: LoadedRecipe,
    sweep: Sweep,
    *,
    task: TaskMaker | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> RangeTest:
    """Do a range test of a recipe; a collective of all processes of the world this one finds itself in.

    Args:
        loaded: The recipe.
        sweep: How.
        task: Makes the task, instead of the one the recipe names.
        say: Told what goes on, on the first process.

    Raises:
        PacelineError: For every mistake in the recipe or the data.
        TrainingError: If not even the first loss is a number, or it was asked to stop.
        KeyboardInterrupt: For Ctrl-C where it is alone.
    """
    world = read_launch(os.environ).world
    recipe = as_tested(loaded.recipe, sweep.steps, world_size=world.world_size)
    with restore_globals(recipe.parallel.device), _scratch(world) as run_dir:
        options = Options(run_dir=run_dir, task=task)
        with opened_run(LoadedRecipe(recipe, loaded.name), options) as run:
            taken = take_steps(run, sweep, say if world.is_first else lambda _: None)
            facts, stop = _facts(run, loaded.recipe), run.stop.signal_name
            # Then nobody writes any more into what the first process is about to remove.
            run.recorder.flush()
            run.collectives.barrier()
    if taken.ending == "signal":
        _end_by(stop, taken, alone=world.world_size == 1)
    check_any(taken)
    return _result(loaded, sweep, taken, facts)


@contextlib.contextmanager
def _scratch(world: World) -> Iterator[Path | None]:
    """A directory for the run, made and removed by the first process; the others learn of it from that."""
    if not world.is_first:
        yield None
        return
    # All hosts must see it, and what they share is more likely here than in each one's own /tmp.
    place = None if world.world_size == world.local_world_size else Path.cwd()
    with tempfile.TemporaryDirectory(prefix="paceline-lr-", dir=place, ignore_cleanup_errors=True) as folder:
        yield Path(folder) / "run"


def _end_by(name: str | None, taken: Taken, *, alone: bool) -> None:
    """End as the signal asked for that the run took for a request to stop.

    Raises:
        KeyboardInterrupt: For SIGINT to a process that is alone.
        TrainingError: Else.
    """
    if alone and name == signal.SIGINT.name:
        raise KeyboardInterrupt
    raise TrainingError(
        f"the range test was ended by {name or 'another process'} after {len(taken.losses)} steps; it has no result, "
        "and has changed nothing."
    )


def _facts(run: Run, asked: Recipe) -> dict[str, Any]:
    plan = run.plan
    return {
        "device": plan.device,
        "device_name": plan.device_name,
        "precision": plan.precision,
        "strategy": plan.strategy,
        "world_size": plan.world_size,
        "global_batch_size": plan.global_batch_size,
        "micro_batch_size": plan.micro_batch_size,
        "steps_per_epoch": plan.steps_per_epoch,
        "optimizer": asked.optimizer.name,
        "optimizer_lr": asked.optimizer.lr,
        "lr_factor": lr_factor(asked, min(plan.global_batch_size, plan.train_samples)),
    }


def _result(loaded: LoadedRecipe, sweep: Sweep, taken: Taken, facts: Mapping[str, Any]) -> RangeTest:
    suggestions = suggest(taken.rates, taken.losses, smoothing=sweep.smoothing, steps=sweep.steps)
    return RangeTest(
        name=loaded.name,
        recipe=loaded.recipe,
        sweep=sweep,
        facts=facts,
        rates=tuple(taken.rates),
        losses=tuple(taken.losses),
        averages=tuple(smoothed(taken.losses, sweep.smoothing)),
        ending=taken.ending,
        skipped=taken.skipped,
        suggestions=suggestions,
        notes=tuple(_notes(loaded.recipe, sweep, taken, facts, suggestions)),
    )


def _notes(
    recipe: Recipe, sweep: Sweep, taken: Taken, facts: Mapping[str, Any], suggestions: Mapping[str, Suggestion]
) -> Iterator[str]:
    chosen = suggestions[MEDIAN].lr
    if chosen is None:
        yield (
            "without a suggestion the recipe's own optimizer.lr stays the best guess; more --steps, or a higher "
            "--highest, may show a fall that these steps do not"
        )
    elif chosen < _FAR * (own := facts["optimizer_lr"] * facts["lr_factor"]):
        yield (
            f"the suggestion is {own / chosen:,.0f} times below the recipe's own rate: of weights that are trained "
            "already the loss hardly falls, and the first batches decide where; try more --steps or another seed "
            "before it is believed"
        )
    averages = smoothed(taken.losses, sweep.smoothing)
    if taken.ending == "highest" and averages.index(min(averages)) >= _NEAR_THE_END * len(averages):
        yield f"the loss was lowest near the highest rate, {sweep.highest:g}: there may be better ones above it"
    if facts["lr_factor"] != 1:
        yield (
            f"rates are those of the steps; optimizer.lr is multiplied by {facts['lr_factor']:g} "
            f"(lr_scaling={recipe.optimizer.lr_scaling}) to get them, and is written before that"
        )
    if recipe.schedule.warmup.value:
        yield "the test rises by itself and has no warm-up; a peak rate reached by schedule.warmup may bear more"
    if recipe.batch.growth:
        yield "the batch's first size was tested, not what batch.growth makes of it"
    if recipe.model.unfreeze:
        yield "what model.frozen holds was held in all steps; model.unfreeze comes later"
    if recipe.model.freeze_after:
        yield "what model.freeze_after holds later was trained in all steps"
    if recipe.data.progressive.start_size is not None:
        yield "images had the first size of data.progressive, unless the test went through its epochs"
