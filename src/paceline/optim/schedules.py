"""Schedule shapes, and momentum and weight decay at each step: pure functions without state."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.plan.rates import LearningRate, anneal_factor
from paceline.recipe.training import Course


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
class Settings:
    """The optimizer's settings at a step; None leaves a setting unchanged.

    Attributes:
        learning_rate: Learning rate of a group with factor 1.
        momentum: Momentum, or the first beta.
        weight_decay: Weight decay of a group with factor 1.
    """

    learning_rate: float
    momentum: float | None = None
    weight_decay: float | None = None


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

    def at(self, step: int, position: int | None = None) -> Settings:
        """Return the settings of optimizer step ``step`` (from 0) on global batch ``position``."""
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
            return course.end + (start - course.end) * anneal_factor("cosine", x)
        case "opposite":
            return start + (course.end - start) * rate.in_cycle(step)[1]
    return start
