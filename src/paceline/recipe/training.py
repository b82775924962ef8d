"""The recipe's `batch`, `optimizer`, `schedule` and `train` sections: how the weights move."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from paceline.recipe.fields import (
    STRICT,
    Applies,
    Auto,
    Length,
    NonNegativeFloat,
    Off,
    OpenFraction,
    PositiveFloat,
    PositiveInt,
    Switch,
)
from paceline.units import Duration


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Batch:
    """How many samples a step sees; absolute, whatever the number of processes."""

    global_size: PositiveInt = 256
    """Samples per optimizer step over all processes."""
    micro_size: Auto | PositiveInt = "auto"
    """Samples per forward pass on one process; `auto` takes a process's whole share."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Optimizer:
    """The update rule."""

    name: Literal["sgd", "adamw"] = "sgd"
    """`sgd` (with momentum) or `adamw` (Loshchilov and Hutter 2017)."""
    lr: PositiveFloat = 0.1
    """Peak learning rate, for the global batch as given: it is never scaled silently."""
    weight_decay: NonNegativeFloat = 0.0
    """L2 coefficient (`sgd`) or decoupled decay (`adamw`)."""
    decay_norm_and_bias: Switch = False
    """Whether weight decay also acts on biases and normalisation parameters."""
    momentum: Annotated[OpenFraction, Applies("name", ("sgd",))] = 0.9
    """Momentum coefficient."""
    nesterov: Annotated[Switch, Applies("name", ("sgd",))] = False
    """Nesterov's form of momentum."""
    betas: Annotated[tuple[OpenFraction, OpenFraction], Applies("name", ("adamw",))] = (0.9, 0.999)
    """Decay of the first and second moment estimates."""
    eps: Annotated[PositiveFloat, Applies("name", ("adamw",))] = 1e-8
    """Added to the denominator."""
    clip_norm: Annotated[PositiveFloat | None, Off] = None
    """Largest L2 norm of the whole gradient, or `off`."""

    @model_validator(mode="after")
    def _check_nesterov(self) -> Self:
        if self.nesterov and self.momentum == 0:
            raise ValueError("found nesterov=true with momentum=0, but Nesterov's form needs a momentum above 0")
        return self


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Schedule:
    """The learning rate as a function of the step."""

    name: Literal["constant", "step", "linear", "cosine"] = "cosine"
    """Shape after the warm-up."""
    warmup: Length = Duration(0, "steps")
    """Linear rise to the peak (Goyal et al. 2017)."""
    end_lr: Annotated[NonNegativeFloat, Applies("name", ("linear", "cosine"))] = 0.0
    """Learning rate at the run's end."""
    milestones: Annotated[tuple[Length, ...], Applies("name", ("step",))] = ()
    """When the rate falls, counted from the start of the run."""
    gamma: Annotated[PositiveFloat, Applies("name", ("step",))] = 0.1
    """Factor at each milestone."""

    @model_validator(mode="after")
    def _check_milestones(self) -> Self:
        if self.name == "step" and not self.milestones:
            raise ValueError("found name=step without milestones, but a step schedule needs at least one")
        return self


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GradScaler:
    """Loss scaling for fp16 (torch.amp.GradScaler)."""

    init_scale: PositiveFloat = 65536.0
    """Scale of the loss at the first step."""
    growth_factor: Annotated[PositiveFloat, Field(gt=1)] = 2.0
    """Factor on the scale after `growth_interval` steps without overflow."""
    backoff_factor: Annotated[PositiveFloat, Field(lt=1)] = 0.5
    """Factor on the scale after an overflow; that step is not taken."""
    growth_interval: PositiveInt = 2000
    """Steps without overflow before the scale grows."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Train:
    """How long and in which numbers."""

    duration: Length = Duration(10, "epochs")
    """Length of the run."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Arithmetic of forward and backward passes; weights stay fp32."""
    grad_scaler: Annotated[GradScaler, Applies("precision", ("fp16",))] = GradScaler()
    """Loss scaling; has an effect with fp16 only."""
    ema: Annotated[OpenFraction | None, Off] = None
    """Decay of the moving average of the weights, or `off`; smaller at first: (1 + t) / (10 + t) after t steps."""
    label_smoothing: OpenFraction = 0.0
    """Share of the target spread over all classes (Szegedy et al. 2015)."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """What a loss that is not finite does, before it moves the weights: end the run, or leave out its step."""
    max_nonfinite: Annotated[PositiveInt, Applies("nonfinite", ("skip",))] = 10
    """Steps of a run that may be left out for this; one more ends it."""
    deterministic: Switch = False
    """Insist on deterministic kernels where the device has a choice (CUDA); slower."""
