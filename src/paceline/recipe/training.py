"""The recipe's `batch`, `train` and `distillation` sections: batch size, duration, precision."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from paceline.recipe.fields import (
    Applies,
    Auto,
    Belongs,
    ByClass,
    Epoch,
    Fraction,
    Length,
    LocalPath,
    Names,
    Needs,
    Off,
    OpenFraction,
    Options,
    PositiveFloat,
    PositiveInt,
    Switch,
    section,
)
from paceline.units import Duration

_NOT_SCALED = Needs(("train.precision!=fp16",), "fp16's loss scaling skips every step whose gradient is not finite")
_RAGGED = Needs(
    ("samples of unequal length",), "no sample is padded to its neighbours, so the order does not change the cost"
)


@section
class Batch:
    """Samples per step; absolute, for any number of processes."""

    global_size: PositiveInt = 256
    """Samples per optimizer step over all processes. At most an epoch: the run reports a cut."""
    micro_size: Auto | PositiveInt = "auto"
    """Samples per forward pass on one process; `auto` is a process's whole share."""
    growth: dict[Epoch, PositiveInt] = Field(default_factory=dict)
    """Samples per step from an epoch on, counted from 0: {30: 512, 60: 1024} (Smith et al. 2018). Micro-batches keep
    their size, and there are more of them; the learning rate follows `optimizer.lr_scaling`."""
    balance: Annotated[bool, _RAGGED] = True
    """For samples of unequal length, padded to the longest of their micro-batch: give steps about the same number of
    tokens, and a step's micro-batches about the same cost, grouping samples of similar length, fewer the longer they
    are. Without it, samples are used as drawn, the same number per micro-batch."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(size == following for size, following in pairwise(self.sizes().values())):
            raise ValueError(f"found growth={dict(sorted(self.growth.items()))}, but each must change the batch's size")
        return self

    def sizes(self) -> dict[int, int]:
        """Return samples per step by the epoch at which they take effect, ascending; the first is 0."""
        return {0: self.global_size} | dict(sorted(self.growth.items()))


@section
class GradScaler:
    """Loss scaling for fp16 (torch.amp.GradScaler)."""

    init_scale: PositiveFloat = 65536.0
    """Scale of the loss at the first step."""
    growth_factor: Annotated[PositiveFloat, Field(gt=1)] = 2.0
    """Factor on the scale after `growth_interval` steps without overflow."""
    backoff_factor: Annotated[PositiveFloat, Field(lt=1)] = 0.5
    """Factor on the scale after an overflow; that step is skipped."""
    growth_interval: PositiveInt = 2000
    """Steps without overflow before the scale grows."""


@section
class Train:
    """Duration, precision and loss."""

    duration: Length = Duration(10, "epochs")
    """Length of the run."""
    until: Annotated[Length | None, Off] = None
    """Stop here with a checkpoint, before the end of the run; it can be resumed (`--until`)."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"
    """Arithmetic of forward and backward passes; weights stay fp32. `auto` is bf16 on hardware for it, except for your
    own tasks, and for many depthwise convolutions on a CPU. `fp8` is bf16 with linear layers in fp8."""
    float32_matmul: Literal["auto", "highest", "high", "medium"] = "auto"
    """How fp32 numbers are multiplied: `highest` in fp32, `high` in TF32, `medium` in bf16 (convolutions on CUDA in
    TF32); `auto` leaves torch's default."""
    grad_scaler: Annotated[GradScaler, Applies("precision", ("fp16",))] = GradScaler()
    """Loss scaling; has an effect with fp16 only."""
    ema: Annotated[OpenFraction | None, Off] = None
    """Decay of the moving average of the weights, or `off`; smaller at first: (1 + t) / (10 + t) after t steps."""
    loss: Annotated[str, Names("losses")] = "cross_entropy"
    """For image classification: `cross_entropy`; `bce`, a yes-or-no question for each class (Wightman et al. 2021);
    `focal`, which multiplies each term of the cross-entropy by (1 - p)^gamma (Lin et al. 2017); a name that an
    installed package registers, or your own `package.module:factory`. For several labels: `bce`, the default there,
    `asl`, which counts easy negatives less (Ridnik et al. 2021), or your own. For image regression, whose targets
    have a
    mean of 0 and a standard deviation of 1: `mse`, `l1`, or `huber`, which is half of `mse` up to an error of 1, and
    then grows as `l1`. For segmentation: `cross_entropy` of each image's pixels, or `cross_entropy_dice`, which adds
    the Dice loss of the image's classes."""
    loss_options: Annotated[Options, Applies("loss", ("asl", "focal")), Belongs("loss")] = Field(default_factory=dict)
    """Keyword arguments of the loss: `gamma` for `focal` (default 2); `gamma_negative` (4), `gamma_positive` (1) and
    `clip` (0.05) for `asl`; or those of your own factory."""
    target_threshold: Annotated[OpenFraction | None, Off, Applies("loss", ("bce",))] = None
    """Make mixed and smoothed targets 1 above this and 0 below, or `off`."""
    label_smoothing: OpenFraction = 0.0
    """Share of the target spread over all classes (Szegedy et al. 2015)."""
    class_weights: Annotated[ByClass | None, Off] = None
    """Weight of a sample in the loss, by class: a mapping of class names to weights, 1 for other classes; or
    `balanced`, n / (classes * n_c), which makes all classes count equally. The loss of a step is the weighted mean
    over its
    global batch."""
    nonfinite: Annotated[Literal["stop", "skip"], _NOT_SCALED] = "stop"
    """What to do about a non-finite loss before it changes the weights: end the run, or skip the step."""
    max_nonfinite: Annotated[PositiveInt, Applies("nonfinite", ("skip",)), _NOT_SCALED] = 10
    """Maximum steps skipped for this; one more ends the run."""
    deterministic: Switch = False
    """Require deterministic kernels where the device has a choice (CUDA), and refuse operations without one; the cost
    is measured before the first step."""


@section
class Distillation:
    """How a network learns from another one, its teacher."""

    teacher: Annotated[LocalPath | None, Off] = None
    """The teacher's weights: a run directory, a checkpoint or a safetensors file, trained on the same classes."""
    kind: Literal["soft", "hard"] = "soft"
    """`soft`: the teacher's probabilities (Hinton et al. 2015); `hard`: its top class as a label (Touvron et al.
    2020)."""
    temperature: Annotated[PositiveFloat, Applies("kind", ("soft",))] = 1.0
    """Divisor of the logits of both; the loss is multiplied by its square."""
    weight: Fraction = 0.5
    """The teacher's share of the loss; the labels get the rest."""
