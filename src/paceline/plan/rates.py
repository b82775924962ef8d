"""A recipe's schedule in steps and rates, and the settings at each step: pure functions, without state to save.

They are the learning rate in all shapes, the momentum and the weight decay.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count, takewhile
from typing import Any, SupportsFloat

from paceline.errors import RecipeError, setting_error
from paceline.plan.epochs import BatchPhase, Epochs
from paceline.plugins.references import call_reference, is_reference
from paceline.plugins.registry import load
from paceline.recipe.schema import Recipe
from paceline.recipe.training import Course, Schedule

# Maximum number of phase boundaries to report; a rate that falls every epoch has as many boundaries.
_MAX_PERIODS_SHOWN = 12
# Treat values this close to 1 as 1: their powers cannot be distinguished from 1.
_NO_FACTOR = 1e-6
# Fraction of the peak, where torch's OneCycleLR and fastai begin.
_CYCLE_START = 1 / 25


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The schedule's part of a plan; ``first_lr`` is None if the warm-up starts from zero.

    ``grown_peak_lrs`` has the peak of each batch size that the run grows to; ``noise_factors`` has the factors of
    ``schedule.noise``, each with the step from which it applies.
    """

    peak_lr: float
    first_lr: float | None
    warmup_steps: int
    milestone_steps: tuple[int, ...]
    period_steps: int | None
    decay_steps: int
    total_steps: int
    batch_phases: tuple[BatchPhase, ...]
    grown_peak_lrs: tuple[float, ...] = ()
    noise_factors: tuple[tuple[int, float], ...] = ()


def plan_schedule(recipe: Recipe, epochs: Epochs, total: int) -> Rates:
    """Resolve the schedule of a run of ``total`` steps.

    Raises:
        RecipeError: If one of its lengths is longer than the run, or is less than a step.
    """
    schedule, optimizer = recipe.schedule, recipe.optimizer
    # An epoch smaller than the batch is one step of all its samples.
    batches = [min(phase.global_batch_size, epochs.samples) for phase in epochs.phases]
    peak, *grown = (optimizer.lr * lr_factor(recipe, batch) for batch in batches)
    if schedule.weight_decay.name != "constant" and optimizer.weight_decay == 0:
        raise setting_error(
            "schedule.weight_decay.name",
            schedule.weight_decay.name,
            "starts from optimizer.weight_decay, which is 0: set that, or leave the schedule out.",
        )
    warmup = epochs.steps_within("schedule.warmup", schedule.warmup, total)
    decay = 0
    if schedule.name == "trapezoid":
        decay = epochs.steps_within("schedule.decay", schedule.decay, total, at_end=True)
    if warmup + decay > total:
        raise setting_error(
            "schedule.warmup",
            schedule.warmup,
            f"and schedule.decay='{schedule.decay}' are {warmup + decay} steps, longer than the run's {total}; shorten "
            "one of them.",
        )
    period = schedule.period
    if period is not None and recipe.batch.growth and period.unit in ("epochs", "samples"):
        raise setting_error(
            "schedule.period",
            period,
            "is not the same number of steps before and after the batch grows (batch.growth), and periods are counted "
            "in steps; give it in steps or percent.",
        )
    if schedule.name == "one_cycle" and warmup < 1:
        raise setting_error(
            "schedule.name",
            "one_cycle",
            "rises during schedule.warmup, which has no steps here; set it, for example to '30%'.",
        )
    return Rates(
        peak_lr=peak,
        first_lr=_first_rate(recipe, peak),
        warmup_steps=warmup,
        milestone_steps=tuple(epochs.steps_within("schedule.milestones", each, total) for each in schedule.milestones),
        period_steps=epochs.interval("schedule.period", period, total),
        decay_steps=decay,
        total_steps=total,
        batch_phases=epochs.phases,
        grown_peak_lrs=tuple(grown),
        noise_factors=tuple(_noise_factors(recipe, epochs, total)),
    )


def _noise_factors(recipe: Recipe, epochs: Epochs, total: int) -> Iterator[tuple[int, float]]:
    """Yield the factor on the rate from each epoch with noise on, and then 1."""
    noise = recipe.schedule.noise
    if not noise.std:
        return
    start = epochs.steps_within("schedule.noise.begin", noise.begin, total)
    end = epochs.steps_within("schedule.noise.end", noise.end, total)
    epoch = 0
    while (first := epochs.first_step(epoch)) < end:
        if first >= start:
            generator = random.Random(recipe.seed + epoch)
            draws = (generator.gauss(0, noise.std) for _ in count())
            yield first, 1 + next(draw for draw in draws if abs(draw) < noise.limit)
        epoch += 1
    yield first, 1.0


def explain_rates(recipe: Recipe, epochs: Epochs, rates: Rates) -> dict[str, str]:
    """Explain by dotted key how values that the recipe leaves open, or scales, were determined."""
    schedule, optimizer, rule = recipe.schedule, recipe.optimizer, recipe.optimizer.lr_scaling
    reasons = {}
    if rule != "none":
        reasons["optimizer.lr"] = (
            f"{optimizer.lr:g} for a batch of {optimizer.lr_reference_batch} becomes {rates.peak_lr:g} for "
            f"{min(epochs.phases[0].global_batch_size, epochs.samples)} (lr_scaling={rule})"
        )
    if rates.grown_peak_lrs:
        peaks = (rates.peak_lr, *rates.grown_peak_lrs)
        changes = [
            f"{phase.global_batch_size} samples a step from epoch {phase.first_epoch + 1} (step "
            f"{phase.first_step + 1}), peak rate "
            + (f"{previous:g} becomes {peak:g}" if rule != "none" else f"stays {peak:g}")
            for phase, previous, peak in zip(epochs.phases[1:], peaks, peaks[1:], strict=False)
        ]
        reasons["batch.growth"] = f"{'; '.join(changes)} (lr_scaling={rule})"
    published = f"{optimizer.moment_decay}, as {optimizer.name} is published"
    reasons["optimizer.betas"] = "optimizer.rest=sgd has none" if optimizer.uses_sgd_for_rest else published
    reasons["optimizer.eps"] = f"{optimizer.denominator_eps:g}, as {optimizer.name} is published"
    reasons["schedule.anneal"] = f"{resolve_anneal(schedule)}, as is usual for {schedule.name}"
    start = "the first step of a linear rise from zero" if rates.warmup_steps else "there is no warm-up"
    is_cycle = schedule.name == "one_cycle"
    reasons["schedule.warmup_from"] = "1/25 of the peak, as torch's OneCycleLR begins" if is_cycle else start
    return reasons


def lr_factor(recipe: Recipe, batch: int) -> float:
    """Scale the learning rate to the batch by the recipe's rule."""
    optimizer = recipe.optimizer
    if optimizer.lr_scaling == "none" or optimizer.lr_reference_batch is None:
        return 1.0
    ratio = batch / optimizer.lr_reference_batch
    return ratio if optimizer.lr_scaling == "linear" else math.sqrt(ratio)


def _first_rate(recipe: Recipe, peak: float) -> float | None:
    schedule = recipe.schedule
    if schedule.warmup_from == "unscaled":
        if recipe.optimizer.lr_scaling == "none":
            raise setting_error(
                "schedule.warmup_from",
                "unscaled",
                "starts from optimizer.lr before scaling, but optimizer.lr_scaling=none; set a rule, or a share of the "
                "peak.",
            )
        return recipe.optimizer.lr
    if schedule.warmup_from != "auto":
        return schedule.warmup_from * peak
    return peak * _CYCLE_START if schedule.name == "one_cycle" else None


def resolve_anneal(schedule: Schedule) -> str:
    """The shape of `schedule.anneal`."""
    if schedule.anneal != "auto":
        return schedule.anneal
    return "cosine" if schedule.name == "one_cycle" else "linear"


@dataclass(frozen=True)
class LearningRatePoint:
    """Learning rate at the boundary of a phase of the schedule."""

    step: int
    learning_rate: float
    phase: str


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """The learning rate of a run as a function of the step.

    The warm-up goes from ``first`` at step 0 to ``peak``, which the first step after it has:

    * linear: ``first + (peak - first) * step / warmup_steps``; without ``first``, ``peak * (step + 1) / warmup_steps``
    * exponential: ``first * (peak / first) ** (step / warmup_steps)``
    * constant: ``first``

    After it, ``x`` runs from 0 to 1 over the remaining steps, ``t`` counts them, and the rate is

    * constant: ``peak``
    * linear: ``peak + (end - peak) * x``
    * cosine: ``end + (peak - end) * (1 + cos(pi * x)) / 2`` (Loshchilov and Hutter 2016); with a period, ``x`` runs
      from 0 to 1 over each period, and each is ``period_factor`` times as long as the one before
    * cyclic: ``end + (peak - end) * abs(1 - 2 * x)``, where ``x`` runs from 0 to 1 over each period (Smith 2017)
    * polynomial: ``end + (peak - end) * (1 - x) ** power``
    * exponential: ``peak * gamma ** (t / period)``, or without a period ``peak * (end / peak) ** x``
    * step: ``peak * gamma ** n``, where ``n`` is the number of milestones passed, or of whole periods in ``t``
    * trapezoid: ``peak``; in the last ``decay_steps`` steps, with ``x`` the fraction of them that is done,
      ``end + (peak - end)`` times ``1 - x``, ``(1 + cos(pi * x)) / 2`` or ``1 - sqrt(x)`` (Hägele et al. 2024)
    * one_cycle: as torch's OneCycleLR of two phases: the rise ends at step ``warmup_steps - 1``, the fall at the last
      step, both by cosine or linear.

    Where the batch grows, ``peak`` changes at the global batches listed in ``growth``: (batch number, peak). ``noise``
    lists factors on the rate: (batch number from which it applies, factor).
    """

    name: str
    peak: float
    total_steps: int
    end: float = 0.0
    warmup_steps: int = 0
    warmup_shape: str = "linear"
    first: float | None = None
    milestones: tuple[int, ...] = ()
    period: int | None = None
    period_factor: float = 1.0
    gamma: float = 0.1
    power: float = 2.0
    decay_steps: int = 0
    anneal: str = "linear"
    growth: tuple[tuple[int, float], ...] = ()
    noise: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, schedule: Schedule, rates: Rates) -> LearningRate:
        """Return the schedule of a recipe with a plan's numbers."""
        return cls(
            name=schedule.name,
            peak=rates.peak_lr,
            total_steps=rates.total_steps,
            end=schedule.end_lr,
            warmup_steps=rates.warmup_steps,
            warmup_shape=schedule.warmup_shape,
            first=rates.first_lr,
            milestones=rates.milestone_steps,
            period=rates.period_steps,
            period_factor=schedule.period_factor,
            gamma=schedule.gamma,
            power=schedule.power,
            decay_steps=rates.decay_steps,
            anneal=resolve_anneal(schedule),
            growth=tuple(
                (phase.first_step, peak)
                for phase, peak in zip(rates.batch_phases[1:], rates.grown_peak_lrs, strict=True)
            ),
            noise=rates.noise_factors,
        )

    def __call__(self, step: int, position: int | None = None) -> float:
        """Return the learning rate of the optimizer step numbered ``step``, from 0.

        Args:
            step: Steps taken before it.
            position: Global batches used up before it, which determine batch growth; equals ``step`` if no step was
                skipped.
        """
        current = step if position is None else position
        if self.noise:
            count = bisect_right(self.noise, current, key=lambda each: each[0])
            return replace(self, noise=())(step, position) * (self.noise[count - 1][1] if count else 1.0)
        if self.growth and current >= self.growth[0][0]:
            peak = next(peak for first, peak in reversed(self.growth) if current >= first)
            return replace(self, peak=peak, growth=())(step)
        # The rise of one_cycle is part of its shape.
        if step < self.warmup_steps and self.name != "one_cycle":
            return self._warmup_rate(step)
        return self._shape(self, step)

    @cached_property
    def _shape(self) -> Callable[[LearningRate, int], float]:
        shape: Callable[[LearningRate, int], float] = load("schedules", self.name, RecipeError)
        return partial(_custom_rate, shape) if is_reference(self.name) else shape

    def progress(self, step: int) -> float:
        """Return the fraction of the run after the warm-up that is done before a step, from 0 to 1."""
        return min((step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps), 1.0)

    def phases(self) -> tuple[LearningRatePoint, ...]:
        """Return the rate at each phase boundary."""
        points = {0: "warmup" if self.warmup_steps else self.name}
        if self.name == "one_cycle":
            points[max(self.warmup_steps - 1, 0)] = "peak"
        elif self.warmup_steps:
            points[min(self.warmup_steps, self.total_steps - 1)] = f"{self.name} from the peak"
        points |= dict.fromkeys(self.milestones, "milestone")
        points |= {first: "the batch grows" for first, _ in self.growth}
        points |= {first: "noise begins" for first, _ in self.noise[:1]}
        boundaries = takewhile(lambda step: step < self.total_steps, self._period_ends())
        points |= {step: "next period" for _, step in zip(range(_MAX_PERIODS_SHOWN), boundaries, strict=False)}
        if self.name == "trapezoid":
            points[self.total_steps - self.decay_steps] = "decay"
        points[self.total_steps - 1] = "last step"
        return tuple(
            LearningRatePoint(step, self(step), phase)
            for step, phase in sorted(points.items())
            if step < self.total_steps
        )

    def _warmup_rate(self, step: int) -> float:
        if self.first is None:
            return self.peak * ((step + 1) / self.warmup_steps)
        match self.warmup_shape:
            case "exponential":
                return float(self.first * (self.peak / self.first) ** (step / self.warmup_steps))
            case "constant":
                return self.first
        return self.first + (self.peak - self.first) * step / self.warmup_steps

    def towards_end(self, height: float) -> float:
        """Return the rate at a height between the end, 0, and the peak, 1."""
        return self.end + (self.peak - self.end) * height

    def place_in_period(self, done: int) -> float:
        """Return the position within its period, from 0 to 1, of the step that follows ``done`` others."""
        assert self.period is not None
        if self.period_factor - 1 < _NO_FACTOR:
            return done % self.period / self.period
        # The n-th period begins after period * (factor**n - 1) / (factor - 1) steps.
        finished = math.floor(math.log(done * (self.period_factor - 1) / self.period + 1, self.period_factor) + 1e-9)
        start = self.period * (self.period_factor**finished - 1) / (self.period_factor - 1)
        return (done - start) / (self.period * self.period_factor**finished)

    def _period_ends(self) -> Iterator[int]:
        if self.period is None or self.name == "exponential":
            return
        end, length = float(self.warmup_steps), float(self.period)
        while True:
            end += length
            yield math.ceil(end)
            length *= self.period_factor if self.name == "cosine" and self.period_factor - 1 >= _NO_FACTOR else 1

    def in_cycle(self, step: int) -> tuple[float, float]:
        """Return the rate at the low end of the step's phase, and the relative height from there to the peak."""
        top, last = self.warmup_steps - 1, self.total_steps - 1
        if step <= top:
            low, x = self.first or 0.0, 1 - step / top if top else 0.0
        else:
            low, x = self.end, min((step - top) / max(last - top, 1), 1.0)
        return low, anneal_factor(self.anneal, x)


def _custom_rate(shape: Callable[[LearningRate, int], float], rate: LearningRate, step: int) -> float:
    found: float = call_reference("schedule.name", rate.name, shape, RecipeError, rate, step)
    if not isinstance(found, SupportsFloat):
        raise setting_error("schedule.name", rate.name, f"gave a {type(found).__name__}, not a learning rate.")
    return found


def anneal_factor(shape: str, x: float) -> float:
    """Decay from 1 at ``x`` = 0 to 0 at ``x`` = 1: as a ``cosine``, a ``sqrt``, or linearly."""
    match shape:
        case "cosine":
            return (1 + math.cos(math.pi * x)) / 2
        case "sqrt":
            return 1 - math.sqrt(x)
    return 1 - x


def constant(rate: LearningRate, step: int) -> float:
    """Return the peak."""
    return rate.peak


def linear(rate: LearningRate, step: int) -> float:
    """Decay linearly from the peak to the end value."""
    return rate.peak + (rate.end - rate.peak) * rate.progress(step)


def cosine(rate: LearningRate, step: int) -> float:
    """Decay along half a cosine from the peak to the end value, over the run or over each period."""
    x = rate.progress(step) if rate.period is None else rate.place_in_period(step - rate.warmup_steps)
    return rate.towards_end(anneal_factor("cosine", x))


def cyclic(rate: LearningRate, step: int) -> float:
    """Fall linearly from the peak to the end value and rise back, in each period (Smith 2017)."""
    return rate.towards_end(abs(1 - 2 * rate.place_in_period(step - rate.warmup_steps)))


def polynomial(rate: LearningRate, step: int) -> float:
    """Decay as a power of the remaining fraction of the run."""
    return rate.towards_end((1 - rate.progress(step)) ** rate.power)


def exponential(rate: LearningRate, step: int) -> float:
    """Multiply by a factor each period, or by a constant factor each step down to the end value."""
    if rate.period is None:
        return float(rate.peak * (rate.end / rate.peak) ** rate.progress(step))
    return float(rate.peak * rate.gamma ** ((step - rate.warmup_steps) / rate.period))


def step(rate: LearningRate, step: int) -> float:
    """Multiply by a factor at each milestone or after each period."""
    passed = sum(step >= milestone for milestone in rate.milestones)
    return rate.peak * rate.gamma ** (passed if rate.period is None else (step - rate.warmup_steps) // rate.period)


def trapezoid(rate: LearningRate, step: int) -> float:
    """Hold the peak, then decay in the last steps."""
    decayed = max(step - (rate.total_steps - rate.decay_steps), 0) / max(rate.decay_steps, 1)
    return rate.towards_end(anneal_factor(rate.anneal, min(decayed, 1.0)))


def one_cycle(rate: LearningRate, step: int) -> float:
    """Rise to the peak, then fall to the end value."""
    low, height = rate.in_cycle(step)
    return low + (rate.peak - low) * height


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """The optimizer's settings at a step; None leaves a setting unchanged.

    Attributes:
        learning_rate: Learning rate of a group with factor 1.
        momentum: Momentum, or the first beta.
        weight_decay: Weight decay of a group with factor 1.
        of_groups: What each group is set to, by key; empty if it follows from the groups' factors.
    """

    learning_rate: float
    momentum: float | None = None
    weight_decay: float | None = None
    of_groups: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Schedules:
    """All settings that change during training.

    Attributes:
        learning_rate: Its schedule.
        momentum: Schedule of the momentum and its initial value; None if constant.
        weight_decay: The same for weight decay.
    """

    learning_rate: LearningRate
    momentum: tuple[Course, float] | None = None
    weight_decay: tuple[Course, float] | None = None

    def at(self, step: int, position: int | None = None) -> OptimizerSettings:
        """Return the settings of optimizer step ``step`` (from 0) on global batch ``position``."""
        rate = self.learning_rate
        return OptimizerSettings(
            learning_rate=rate(step, position),
            momentum=None if self.momentum is None else _on_course(*self.momentum, step, rate),
            weight_decay=None if self.weight_decay is None else _on_course(*self.weight_decay, step, rate),
        )


def _on_course(course: Course, start: float, step: int, rate: LearningRate) -> float:
    x = min(step / rate.total_steps, 1.0)
    match course.name:
        case "linear":
            return start + (course.end - start) * x
        case "cosine":
            return course.end + (start - course.end) * anneal_factor("cosine", x)
        case "opposite":
            return start + (course.end - start) * rate.in_cycle(step)[1]
    return start
