"""Learning rate, momentum and weight decay at each step: pure functions, with nothing to save or resume wrongly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import SupportsFloat

from paceline.errors import RecipeError
from paceline.recipe.plan import LearningRatePoint, Plan
from paceline.recipe.rates import resolve_anneal
from paceline.recipe.schedule import Course, Schedule
from paceline.references import call_reference, is_reference
from paceline.registry import load

# Boundaries of phases to be told; a rate that falls every epoch has as many.
_TOLD = 12
# So little more than 1 that powers of it cannot be told from 1.
_NO_FACTOR = 1e-6


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
    * polynomial: ``end + (peak - end) * (1 - x) ** power``
    * exponential: ``peak * gamma ** (t / period)``, or without a period ``peak * (end / peak) ** x``
    * step: ``peak * gamma ** n``, where ``n`` is the number of milestones passed, or of whole periods in ``t``
    * trapezoid: ``peak``; in the last ``decay_steps`` steps, ``x`` being their part done, ``end + (peak - end)`` times
      ``1 - x``, ``(1 + cos(pi * x)) / 2`` or ``1 - sqrt(x)`` (Hägele et al. 2024)
    * one_cycle: as torch's OneCycleLR of two phases: the rise ends at step ``warmup_steps - 1``, the fall at the last
      step, both by cosine or linear.

    Where the batch grows, ``peak`` is another one from a global batch on, as ``growth`` says: (its number, peak).
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

    @classmethod
    def of(cls, schedule: Schedule, plan: Plan) -> LearningRate:
        """The schedule of a recipe with the plan's numbers."""
        return cls(
            name=schedule.name,
            peak=plan.peak_lr,
            total_steps=plan.total_steps,
            end=schedule.end_lr,
            warmup_steps=plan.warmup_steps,
            warmup_shape=schedule.warmup_shape,
            first=plan.first_lr,
            milestones=plan.milestone_steps,
            period=plan.period_steps,
            period_factor=schedule.period_factor,
            gamma=schedule.gamma,
            power=schedule.power,
            decay_steps=plan.decay_steps,
            anneal=resolve_anneal(schedule),
            growth=tuple(
                (phase.first_step, peak) for phase, peak in zip(plan.batch_phases[1:], plan.grown_peak_lrs, strict=True)
            ),
        )

    def __call__(self, step: int, position: int | None = None) -> float:
        """Learning rate used by the optimizer step numbered ``step``, from 0.

        Args:
            step: Steps taken before it.
            position: Global batches used up before it, by which the batch grows; ``step`` where none was skipped.
        """
        at = step if position is None else position
        if self.growth and at >= self.growth[0][0]:
            peak = next(peak for first, peak in reversed(self.growth) if at >= first)
            return replace(self, peak=peak, growth=())(step)
        return self._from_peak(step)

    def _from_peak(self, step: int) -> float:
        # The rise of one_cycle is a part of its shape.
        if step < self.warmup_steps and self.name != "one_cycle":
            return self._warming(step)
        if not is_reference(self.name):
            return self._shape(self, step)
        rate: float = call_reference("schedule.name", self.name, self._shape, RecipeError, self, step)
        if not isinstance(rate, SupportsFloat):
            raise RecipeError(f"schedule.name={self.name} gave a {type(rate).__name__}, not a learning rate.")
        return rate

    @cached_property
    def _shape(self) -> Callable[[LearningRate, int], float]:
        shape: Callable[[LearningRate, int], float] = load("schedules", self.name, RecipeError)
        return shape

    def progress(self, step: int) -> float:
        """The part of the run after the warm-up that is done before a step, from 0 to 1."""
        return min((step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps), 1.0)

    def height(self, step: int) -> float:
        """How high above the end of its phase the rate of a one_cycle is, as a share of the way to the peak."""
        return self.in_cycle(step)[1]

    def phases(self) -> tuple[LearningRatePoint, ...]:
        """The rate at each phase boundary, for the plan."""
        points = {0: "warmup" if self.warmup_steps else self.name}
        if self.name == "one_cycle":
            points[max(self.warmup_steps - 1, 0)] = "peak"
        elif self.warmup_steps:
            points[min(self.warmup_steps, self.total_steps - 1)] = f"{self.name} from the peak"
        points |= dict.fromkeys(self.milestones, "milestone")
        points |= {first: "the batch grows" for first, _ in self.growth}
        boundaries = takewhile(lambda step: step < self.total_steps, self._period_ends())
        points |= {step: "next period" for _, step in zip(range(_TOLD), boundaries, strict=False)}
        if self.name == "trapezoid":
            points[self.total_steps - self.decay_steps] = "decay"
        points[self.total_steps - 1] = "last step"
        return tuple(
            LearningRatePoint(step, self(step), phase)
            for step, phase in sorted(points.items())
            if step < self.total_steps
        )

    def _warming(self, step: int) -> float:
        if self.first is None:
            return self.peak * ((step + 1) / self.warmup_steps)
        match self.warmup_shape:
            case "exponential":
                return float(self.first * (self.peak / self.first) ** (step / self.warmup_steps))
            case "constant":
                return self.first
        return self.first + (self.peak - self.first) * step / self.warmup_steps

    def towards_end(self, height: float) -> float:
        """The rate at a height between the end, 0, and the peak, 1."""
        return self.end + (self.peak - self.end) * height

    def place_in_period(self, done: int) -> float:
        """Where in its period, from 0 to 1, the step is that comes after ``done`` others."""
        assert self.period is not None
        if self.period_factor - 1 < _NO_FACTOR:
            return done % self.period / self.period
        # The n-th period begins after period * (factor**n - 1) / (factor - 1) steps.
        finished = math.floor(math.log(done * (self.period_factor - 1) / self.period + 1, self.period_factor) + 1e-9)
        begin = self.period * (self.period_factor**finished - 1) / (self.period_factor - 1)
        return (done - begin) / (self.period * self.period_factor**finished)

    def _period_ends(self) -> Iterator[int]:
        if self.period is None or self.name == "exponential":
            return
        end, length = float(self.warmup_steps), float(self.period)
        while True:
            end += length
            yield math.ceil(end)
            length *= self.period_factor if self.name == "cosine" and self.period_factor - 1 >= _NO_FACTOR else 1

    def in_cycle(self, step: int) -> tuple[float, float]:
        """The rate at the low end of the step's phase, and how far the rate is from there to the peak."""
        top, last = self.warmup_steps - 1, self.total_steps - 1
        if step <= top:
            low, x = self.first or 0.0, 1 - step / top if top else 0.0
        else:
            low, x = self.end, min((step - top) / max(last - top, 1), 1.0)
        return low, _fall(self.anneal, x)


def _cosine(x: float) -> float:
    return (1 + math.cos(math.pi * x)) / 2


def _fall(shape: str, x: float) -> float:
    """From 1 at ``x`` = 0 to 0 at 1."""
    match shape:
        case "cosine":
            return _cosine(x)
        case "sqrt":
            return 1 - math.sqrt(x)
    return 1 - x


def constant(rate: LearningRate, step: int) -> float:
    """The peak."""
    return rate.peak


def linear(rate: LearningRate, step: int) -> float:
    """A straight line from the peak to the end."""
    return rate.peak + (rate.end - rate.peak) * rate.progress(step)


def cosine(rate: LearningRate, step: int) -> float:
    """Half a cosine from the peak to the end, over the run or over each period."""
    x = rate.progress(step) if rate.period is None else rate.place_in_period(step - rate.warmup_steps)
    return rate.towards_end(_cosine(x))


def polynomial(rate: LearningRate, step: int) -> float:
    """A power of what is left of the run."""
    return rate.towards_end((1 - rate.progress(step)) ** rate.power)


def exponential(rate: LearningRate, step: int) -> float:
    """A factor in each period, or the same factor in each step to the end."""
    if rate.period is None:
        return float(rate.peak * (rate.end / rate.peak) ** rate.progress(step))
    return float(rate.peak * rate.gamma ** ((step - rate.warmup_steps) / rate.period))


def step(rate: LearningRate, step: int) -> float:
    """A factor at each milestone, or after each period."""
    passed = sum(step >= milestone for milestone in rate.milestones)
    return rate.peak * rate.gamma ** (passed if rate.period is None else (step - rate.warmup_steps) // rate.period)


def trapezoid(rate: LearningRate, step: int) -> float:
    """The peak, and a fall in the last steps."""
    done = max(step - (rate.total_steps - rate.decay_steps), 0) / max(rate.decay_steps, 1)
    return rate.towards_end(_fall(rate.anneal, min(done, 1.0)))


def one_cycle(rate: LearningRate, step: int) -> float:
    """A rise to the peak, and a fall to the end."""
    low, height = rate.in_cycle(step)
    return low + (rate.peak - low) * height


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the optimizer is set to at a step; None where its own value stays.

    Attributes:
        learning_rate: The rate of a group whose own factor is 1.
        momentum: Momentum, or the first beta.
        weight_decay: Weight decay of a group whose own factor is 1.
    """

    learning_rate: float
    momentum: float | None = None
    weight_decay: float | None = None


@dataclass(frozen=True, kw_only=True)
class Schedules:
    """All that moves with the step.

    Attributes:
        learning_rate: The schedule.
        momentum: The course of the momentum, and where it starts; None if it is constant.
        weight_decay: The same of weight decay.
    """

    learning_rate: LearningRate
    momentum: tuple[Course, float] | None = None
    weight_decay: tuple[Course, float] | None = None

    def at(self, step: int, position: int | None = None) -> Settings:
        """The settings of the optimizer step numbered ``step``, from 0, on the global batch numbered ``position``."""
        rate = self.learning_rate
        return Settings(
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
            return course.end + (start - course.end) * _cosine(x)
        case "opposite":
            return start + (course.end - start) * rate.height(step)
    return start
