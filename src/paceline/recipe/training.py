"""The recipe's `batch`, `train` and `distillation` sections: how many samples, how long, in which numbers."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from paceline.recipe.fields import (
    STRICT,
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
)
from paceline.registry import built_in
from paceline.units import Duration

_NOT_SCALED = Needs(
    ("train.precision!=fp16",), "fp16's loss scaling leaves out every step whose gradient is not finite"
)
_RAGGED = Needs(
    ("samples of unequal length",), "no sample is padded to what stands beside it, so that all cost alike in any order"
)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Batch:
    """How many samples a step sees; absolute, whatever the number of processes."""

    global_size: PositiveInt = 256
    """Samples per optimizer step over all processes. At most an epoch: the run says what it cuts."""
    micro_size: Auto | PositiveInt = "auto"
    """Samples per forward pass on one process; `auto` takes a process's whole share."""
    growth: dict[Epoch, PositiveInt] = Field(default_factory=dict)
    """Samples per step from an epoch on, counted from 0: {30: 512, 60: 1024} (Smith et al. 2018). Micro-batches stay as
    they are, and there are more of them; the learning rate follows `optimizer.lr_scaling`."""
    balance: Annotated[bool, _RAGGED] = True
    """Where samples are of unequal length and padded to their micro-batch's longest, steps have about the same
    number of tokens, and a step's micro-batches cost about the same: samples of about one length, the fewer of them the
    longer they are. Without it, samples are taken as they are drawn, equally many to a micro-batch."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        sizes = list(self.sizes().values())
        if any(size == following for size, following in pairwise(sizes)):
            raise ValueError(f"found growth={dict(sorted(self.growth.items()))}, but each must change the batch's size")
        return self

    def sizes(self) -> dict[int, int]:
        """Samples per step by the epoch from which they hold, ascending; the first is 0."""
        return {0: self.global_size} | dict(sorted(self.growth.items()))


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
    until: Annotated[Length | None, Off] = None
    """Stop here with a checkpoint, as if asked to, although the run is longer; it can go on (`--until`)."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"
    """Arithmetic of forward and backward passes; weights stay fp32. `fp8` is bf16 with linear layers in fp8."""
    float32_matmul: Literal["auto", "highest", "high", "medium"] = "auto"
    """How fp32 numbers are multiplied: `highest` in fp32, `high` in TF32, `medium` in bf16 (convolutions on CUDA in
    TF32); `auto` leaves torch's default."""
    grad_scaler: Annotated[GradScaler, Applies("precision", ("fp16",))] = GradScaler()
    """Loss scaling; has an effect with fp16 only."""
    ema: Annotated[OpenFraction | None, Off] = None
    """Decay of the moving average of the weights, or `off`; smaller at first: (1 + t) / (10 + t) after t steps."""
    loss: Annotated[str, Names(tuple(built_in("losses")), "losses")] = "cross_entropy"
    """Of image classification: `cross_entropy`; `bce`, a yes-or-no question for each class (Wightman et al. 2021);
    `focal`, which multiplies each term of the cross-entropy by (1 - p)^gamma (Lin et al. 2017); a name that an
    installed package registers, or `package.module:factory` of your own. Of several labels: `bce`, the default there,
    `asl`, which counts easy negatives less (Ridnik et al. 2021), or your own. Of image regression, whose targets have a
    mean of 0 and a standard deviation of 1: `mse`, `l1`, or `huber`, which is half of `mse` up to an error of 1, and
    then grows as `l1`. Of segmentation: `cross_entropy` of each image's pixels, or `cross_entropy_dice`, which adds the
    Dice loss of the classes in the image."""
    loss_options: Annotated[Options, Applies("loss", ("asl", "focal")), Belongs("loss")] = Field(default_factory=dict)
    """Keyword arguments of the loss: `gamma` for `focal` (default 2); `gamma_negative` (4), `gamma_positive` (1) and
    `clip` (0.05) for `asl`; or those of your own factory."""
    target_threshold: Annotated[OpenFraction | None, Off, Applies("loss", ("bce",))] = None
    """Make mixed and smoothed targets 1 above this and 0 below, or `off`."""
    label_smoothing: OpenFraction = 0.0
    """Share of the target spread over all classes (Szegedy et al. 2015)."""
    class_weights: Annotated[ByClass | None, Off] = None
    """How much a sample counts in the loss, by its class: a mapping of class names to weights, 1 for other classes; or
    `balanced`, n / (classes * n_c), by which all classes count alike. The loss of a step is the weighted mean over its
    global batch."""
    nonfinite: Annotated[Literal["stop", "skip"], _NOT_SCALED] = "stop"
    """What a loss that is not finite does, before it moves the weights: end the run, or leave out its step."""
    max_nonfinite: Annotated[PositiveInt, Applies("nonfinite", ("skip",)), _NOT_SCALED] = 10
    """Steps of a run that may be left out for this; one more ends it."""
    deterministic: Switch = False
    """Insist on deterministic kernels where the device has a choice (CUDA), and refuse operations that have none; what
    it costs is measured before the first step."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Distillation:
    """What a network learns from another one, its teacher."""

    teacher: Annotated[LocalPath | None, Off] = None
    """The teacher's weights: a run directory, a checkpoint or a safetensors file, trained on the same classes."""
    kind: Literal["soft", "hard"] = "soft"
    """`soft`: the teacher's probabilities (Hinton et al. 2015); `hard`: its answer as a label (Touvron et al. 2020)."""
    temperature: Annotated[PositiveFloat, Applies("kind", ("soft",))] = 1.0
    """What the logits of both are divided by; the loss is multiplied by its square."""
    weight: Fraction = 0.5
    """The teacher's share of the loss; the labels have the rest."""
