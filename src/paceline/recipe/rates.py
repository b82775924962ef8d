"""A recipe's schedule in steps and rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import RecipeError
from paceline.recipe.phases import Epochs
from paceline.recipe.schedule import Schedule
from paceline.recipe.schema import Recipe
from paceline.units import Duration

# Of the peak, as torch's OneCycleLR and fastai begin.
_CYCLE_BEGINS = 1 / 25


@dataclass(frozen=True)
class Lengths:
    """Turns durations into steps."""

    epochs: Epochs

    def steps(self, length: Duration, total: int | None) -> int:
        """Steps of a length from the run's start; of a run whose total is known, if the length is a share of it."""
        return self.epochs.steps_in(length, total)

    def total(self, duration: Duration) -> int:
        """Steps of the whole run."""
        try:
            total = self.steps(duration, None)
        except ValueError as error:
            raise RecipeError(f"train.duration: {error}; give epochs, steps or samples.") from None
        if total < 1:
            raise RecipeError(f"train.duration='{duration}' comes to no step at all; give at least '1 steps'.")
        return total

    def within(self, key: str, length: Duration, total: int) -> int:
        """Steps of something that must fit into the run."""
        return self._fitting(key, length, self.steps(length, total), total)

    def at_end(self, key: str, length: Duration, total: int) -> int:
        """Steps of something that ends with the run."""
        return self._fitting(key, length, self.epochs.steps_at_end(length, total), total)

    @staticmethod
    def _fitting(key: str, length: Duration, steps: int, total: int) -> int:
        if steps > total:
            raise RecipeError(
                f"{key}='{length}' is {steps} steps, longer than the run's {total}; "
                "shorten it, or lengthen train.duration."
            )
        return steps

    def interval(self, key: str, length: Duration | None, total: int) -> int | None:
        """Steps between things done now and then; None if it is off."""
        if length is None:
            return None
        steps = self.steps(length, total)
        if steps < 1:
            raise RecipeError(f"{key}='{length}' comes to less than one step; give at least '1 steps'.")
        return steps


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The schedule's part of a plan; ``first_lr`` is None where the warm-up begins with its first step from zero.

    ``grown_peak_lrs`` has the peak of each size that the batch grows to.
    """

    peak_lr: float
    first_lr: float | None
    warmup_steps: int
    milestone_steps: tuple[int, ...]
    period_steps: int | None
    decay_steps: int
    grown_peak_lrs: tuple[float, ...] = ()


def plan_schedule(recipe: Recipe, lengths: Lengths, total: int, reasons: dict[str, str]) -> Rates:
    """Resolve the schedule of a run of ``total`` steps.

    Raises:
        RecipeError: If one of its lengths is longer than the run, or comes to nothing.
    """
    schedule, asked = recipe.schedule, recipe.optimizer
    # An epoch smaller than the batch is one step of all its samples.
    batches = [min(phase.global_batch_size, lengths.epochs.samples) for phase in lengths.epochs.phases]
    peak = peak_learning_rate(recipe, batches[0], reasons)
    grown = tuple(asked.lr * lr_factor(recipe, batch) for batch in batches[1:])
    if grown:
        _explain_growth(recipe, lengths.epochs, (peak, *grown), reasons)
    published = f"{asked.moment_decay}, as {asked.name} is published"
    reasons["optimizer.betas"] = "optimizer.rest=sgd has none" if asked.moves_rest_by_sgd else published
    reasons["optimizer.eps"] = f"{asked.denominator_eps:g}, as {asked.name} is published"
    reasons["schedule.anneal"] = f"{resolve_anneal(schedule)}, as is usual for {schedule.name}"
    if schedule.weight_decay.name != "constant" and asked.weight_decay == 0:
        raise RecipeError(
            f"schedule.weight_decay.name={schedule.weight_decay.name} starts from optimizer.weight_decay, which is 0: "
            "set that, or leave the schedule out."
        )
    warmup = lengths.within("schedule.warmup", schedule.warmup, total)
    decay = lengths.at_end("schedule.decay", schedule.decay, total) if schedule.name == "trapezoid" else 0
    if warmup + decay > total:
        raise RecipeError(
            f"schedule.warmup='{schedule.warmup}' and schedule.decay='{schedule.decay}' are {warmup + decay} steps, "
            f"longer than the run's {total}; shorten one of them."
        )
    if schedule.name == "one_cycle" and warmup < 1:
        raise RecipeError(
            "schedule.name=one_cycle rises during schedule.warmup, which is no step here; set it, for example to '30%'."
        )
    return Rates(
        peak_lr=peak,
        first_lr=_first_rate(recipe, peak, warmup, reasons),
        warmup_steps=warmup,
        milestone_steps=tuple(lengths.within("schedule.milestones", each, total) for each in schedule.milestones),
        period_steps=_period(recipe, lengths, total),
        decay_steps=decay,
        grown_peak_lrs=grown,
    )


def _period(recipe: Recipe, lengths: Lengths, total: int) -> int | None:
    period = recipe.schedule.period
    if period is not None and recipe.batch.growth and period.unit in ("epochs", "samples"):
        raise RecipeError(
            f"schedule.period='{period}' is not the same number of steps before and after the batch grows "
            "(batch.growth), and periods are counted in steps; give it in steps or percent."
        )
    return lengths.interval("schedule.period", period, total)


def peak_learning_rate(recipe: Recipe, batch: int, reasons: dict[str, str]) -> float:
    """The learning rate after the recipe's scaling rule; the reason gives both numbers."""
    asked = recipe.optimizer
    scaled = asked.lr * lr_factor(recipe, batch)
    if asked.lr_scaling != "none":
        reasons["optimizer.lr"] = (
            f"{asked.lr:g} for a batch of {asked.lr_reference_batch} becomes {scaled:g} for {batch} "
            f"(lr_scaling={asked.lr_scaling})"
        )
    return scaled


def lr_factor(recipe: Recipe, batch: int) -> float:
    """What the recipe's scaling rule makes of the learning rate for a batch."""
    asked = recipe.optimizer
    if asked.lr_scaling == "none" or asked.lr_reference_batch is None:
        return 1.0
    ratio = batch / asked.lr_reference_batch
    return ratio if asked.lr_scaling == "linear" else math.sqrt(ratio)


def _explain_growth(recipe: Recipe, epochs: Epochs, peaks: Sequence[float], reasons: dict[str, str]) -> None:
    rule = recipe.optimizer.lr_scaling
    told = [
        f"{phase.global_batch_size} samples a step from epoch {phase.first_epoch + 1} (step {phase.first_step + 1}), "
        + (f"peak rate {before:g} becomes {peak:g}" if rule != "none" else f"peak rate stays {peak:g}")
        for phase, before, peak in zip(epochs.phases[1:], peaks, peaks[1:], strict=False)
    ]
    reasons["batch.growth"] = f"{'; '.join(told)} (lr_scaling={rule})"


def _first_rate(recipe: Recipe, peak: float, warmup: int, reasons: dict[str, str]) -> float | None:
    schedule = recipe.schedule
    if schedule.warmup_from == "unscaled":
        if recipe.optimizer.lr_scaling == "none":
            raise RecipeError(
                "schedule.warmup_from=unscaled begins at optimizer.lr before its scaling, and "
                "optimizer.lr_scaling=none; set a rule, or a share of the peak."
            )
        return recipe.optimizer.lr
    if schedule.warmup_from != "auto":
        return schedule.warmup_from * peak
    if schedule.name == "one_cycle":
        reasons["schedule.warmup_from"] = "1/25 of the peak, as torch's OneCycleLR begins"
        return peak * _CYCLE_BEGINS
    reasons["schedule.warmup_from"] = "the first step of a straight rise from zero" if warmup else "there is no warm-up"
    return None


def resolve_anneal(schedule: Schedule) -> str:
    """The shape of `schedule.anneal`."""
    if schedule.anneal != "auto":
        return schedule.anneal
    return "cosine" if schedule.name == "one_cycle" else "linear"
