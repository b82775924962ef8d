"""The recipe's `schedule` section: how learning rate, momentum and weight decay change over the steps."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from paceline.recipe.fields import (
    STRICT,
    Applies,
    Auto,
    Fraction,
    Length,
    Names,
    Needs,
    NonNegativeFloat,
    Off,
    PositiveFloat,
)
from paceline.units import Duration

_NOISY = Needs(("schedule.noise.std",), "the learning rate has no noise (schedule.noise.std)")
_WARMED_UP = Needs(("warm-up",), "there is no warm-up (schedule.warmup)")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Course:
    """A second setting of the optimizer as a function of the step."""

    name: Literal["constant", "linear", "cosine", "opposite"] = "constant"
    """`linear` and `cosine` move from the optimizer's value to `end` over the whole run; `opposite` reaches `end` at
    the peak learning rate and returns (momentum with `one_cycle`, Smith 2018)."""
    end: Annotated[NonNegativeFloat, Applies("name", ("linear", "cosine", "opposite"))] = 0.0
    """Its final value."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RateNoise:
    """Noise on the learning rate, as timm's `--lr-noise`: a new factor for each epoch, drawn around 1."""

    std: Annotated[NonNegativeFloat, Field(le=10)] = 0.0
    """Standard deviation of the factor; 0: no noise."""
    limit: Annotated[Fraction, Field(ge=0.01, lt=1), _NOISY] = 0.67
    """A factor further than this from 1 is drawn again."""
    begin: Annotated[Length, _NOISY] = Duration(0, "steps")
    """The first epoch with noise begins here or later."""
    end: Annotated[Length, _NOISY] = Duration(100, "percent")
    """Epochs that begin here or later have no noise."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Schedule:
    """The learning rate and other scheduled settings: pure functions, with no state to save."""

    name: Annotated[str, Names("schedules")] = "cosine"
    """Shape after the warm-up: `constant`, `step`, `linear`, `cosine`, `cyclic`, `polynomial`, `exponential`,
    `one_cycle` or `trapezoid`; a name that an installed package registers, or your own `package.module:shape`. `step`
    falls at milestones; `cosine` may restart (Loshchilov and Hutter 2016); `cyclic` falls to `end_lr` and rises to the
    peak again in each period (Smith 2017); `one_cycle` rises through its warm-up and falls to the end (Smith and Topin
    2017); `trapezoid` stays at the peak and falls during `decay` (Zhai et al. 2021)."""
    warmup: Length = Duration(0, "steps")
    """Length of the initial rise to the peak (Goyal et al. 2017)."""
    warmup_shape: Annotated[
        Literal["linear", "exponential", "constant"],
        _WARMED_UP,
        Applies("name", ("constant", "step", "linear", "cosine", "cyclic", "polynomial", "exponential", "trapezoid")),
    ] = "linear"
    """Shape of the rise; `constant` stays at `warmup_from` (He et al. 2015)."""
    warmup_from: Annotated[Auto | Literal["unscaled"] | Fraction, _WARMED_UP] = "auto"
    """Rate of the first step as a share of the peak; `unscaled`: `optimizer.lr` before its scaling rule (Goyal et al.
    2017); `auto`: the first step of a linear rise from zero, and 1/25 for `one_cycle`."""
    end_lr: Annotated[
        NonNegativeFloat,
        Applies("name", ("linear", "cosine", "cyclic", "polynomial", "exponential", "one_cycle", "trapezoid")),
    ] = 0.0
    """Learning rate at the run's end, at the end of each of a cosine's periods, and in the middle of a cycle; absolute.
    """
    milestones: Annotated[tuple[Length, ...], Applies("name", ("step",))] = ()
    """When the rate falls, counted from the start of the run."""
    period: Annotated[Length | None, Off, Applies("name", ("step", "cosine", "cyclic", "exponential"))] = None
    """Counted from the end of the warm-up: the rate falls by `gamma` at the end of each (`step`) or over each
    (`exponential`), starts again from the peak (`cosine`), or falls and rises (`cyclic`)."""
    period_factor: Annotated[PositiveFloat, Field(ge=1), Applies("name", ("cosine",))] = 1.0
    """Length of each period relative to the one before."""
    gamma: Annotated[PositiveFloat, Applies("name", ("step", "exponential"))] = 0.1
    """Factor at each milestone, or in each period."""
    power: Annotated[PositiveFloat, Applies("name", ("polynomial",))] = 2.0
    """Exponent of the remaining share of the run."""
    decay: Annotated[Length, Applies("name", ("trapezoid",))] = Duration(20, "percent")
    """Length of the fall at the end of the run."""
    anneal: Annotated[Auto | Literal["linear", "cosine", "sqrt"], Applies("name", ("one_cycle", "trapezoid"))] = "auto"
    """Shape of the rise and fall: `auto` is a cosine for `one_cycle` and linear for `trapezoid`; `sqrt` falls as one
    minus the square root of the time (Hägele et al. 2024)."""
    noise: RateNoise = RateNoise()
    """Noise on the learning rate."""
    momentum: Annotated[Course, Needs(("an optimizer with momentum",), "{optimizer} has no momentum")] = Course()
    """Momentum, or the first of the betas, of an optimizer that has either."""
    weight_decay: Course = Course()
    """Weight decay."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        needed = {"step": "milestones or period", "cyclic": "period"}.get(self.name)
        if needed and not self.milestones and self.period is None:
            raise ValueError(f"found name={self.name} without {needed}, which it needs")
        if self.name == "step" and self.milestones and self.period is not None:
            raise ValueError("found both milestones and period, but a step schedule takes one of them")
        if self.name == "exponential" and self.period is None and self.end_lr == 0:
            raise ValueError("found name=exponential with neither period nor end_lr, but it needs one of them")
        if self.name == "exponential" and self.period is not None and self.end_lr > 0:
            raise ValueError("found both period and end_lr, but an exponential schedule takes one of them")
        if self.name == "one_cycle" and self.anneal == "sqrt":
            raise ValueError("found anneal=sqrt, but one_cycle anneals by cosine or linear")
        if self.name != "one_cycle" and self.warmup_shape != "linear" and self.warmup_from in ("auto", 0):
            raise ValueError(
                f"found warmup_shape={self.warmup_shape} with warmup_from={self.warmup_from}, but it must begin above 0"
            )
        if self.momentum.name == "opposite" and self.name != "one_cycle":
            raise ValueError("found momentum.name=opposite, but only name=one_cycle has a peak within it to oppose")
        if self.momentum.end >= 1:
            raise ValueError(f"found momentum.end={self.momentum.end}, but a momentum is below 1")
        if self.weight_decay.name == "opposite":
            raise ValueError("found weight_decay.name=opposite, but that is for momentum; use linear or cosine")
        return self
