"""The recipe's `batch`, `train`, `distillation`, `optimizer` and `schedule` sections."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from paceline.optimizers import RULES, UNKNOWN_RULE, UpdateRule, optimizers_with
from paceline.parsing.units import Duration
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
    NonNegativeFloat,
    Off,
    OpenFraction,
    Options,
    PositiveFloat,
    PositiveInt,
    Switch,
    section,
)

CLASSIFIER = "classifier"
"""The pattern of `groups` that stands for the network's classifier."""
_NOTHING_SCALED = (
    "{optimizer} scales the steps of decaying parameters, and with optimizer.weight_decay=0 there are none, so it acts "
    "like {unscaled}; give a weight decay, or optimizer.options={{always_adapt: true}}"
)


@section
class ParameterGroup:
    """Settings of a parameter group that differ from the rest."""

    lr_factor: NonNegativeFloat = 1.0
    """Their learning rate, as a factor on the schedule's."""
    weight_decay: Auto | NonNegativeFloat = "auto"
    """Their weight decay, 0 for none; `auto` does not change it."""


@section
class Optimizer:
    """The update rule."""

    name: Annotated[str, Names("optimizers"), Needs(("layers to scale",), _NOTHING_SCALED)] = "sgd"
    """A built-in optimizer, as docs/recipes.md lists them; any other of torch.optim or timm (`nadamw`), a name that an
    installed package registers, or your own `package.module:factory`, all called with parameter groups, `lr` and
    `options`."""
    lr: PositiveFloat = 0.1
    """Peak learning rate for the given global batch: it is never scaled silently."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiply `lr` by the global batch over `lr_reference_batch` (Goyal et al. 2017), or by its square root
    (Krizhevsky 2014)."""
    lr_reference_batch: Annotated[PositiveInt | None, Off, Applies("lr_scaling", ("linear", "sqrt"))] = None
    """The global batch that `lr` is meant for."""
    weight_decay: NonNegativeFloat = 0.0
    """Decay towards zero: added to the gradient (as by `sgd`), to the update before it is normalised (`lamb`), or
    subtracted from the weights (`adamw`)."""
    decay_norm_and_bias: Annotated[
        Switch, Needs(("optimizer.weight_decay",), "with optimizer.weight_decay=0 nothing decays")
    ] = False
    """Whether weight decay also acts on biases and normalisation parameters."""
    momentum: Annotated[OpenFraction, Applies("name", optimizers_with("momentum"))] = 0.9
    """Momentum coefficient; `muon`'s author uses 0.95."""
    nesterov: Annotated[Switch, Applies("name", optimizers_with("nesterov"))] = False
    """Use Nesterov momentum."""
    rest: Annotated[Literal["adamw", "sgd"], Applies("name", ("muon",))] = "adamw"
    """Optimizer of the parameters that `muon` does not update: `adamw`, all but matrices and filters; or `sgd` with
    momentum, all but filters, including classifiers, as in the public CIFAR-10 record (Jordan 2024)."""
    rest_lr_factor: Annotated[PositiveFloat, Applies("rest", ("sgd",))] = 1.0
    """Its learning rate, as a factor on the schedule's; those of `groups` multiply it."""
    rest_momentum: Annotated[OpenFraction, Applies("rest", ("sgd",))] = 0.9
    """Its momentum coefficient; `nesterov` is for both."""
    newton_schulz_steps: Annotated[PositiveInt, Applies("rest", ("sgd",))] = 5
    """Iterations to orthogonalise a step; the CIFAR-10 record uses 3."""
    unit_filters: Annotated[Switch, Applies("rest", ("sgd",))] = False
    """Scale each filter bank to a norm of the square root of its outputs before every step; weight decay then has no
    effect on filters."""
    betas: Annotated[Auto | tuple[OpenFraction, OpenFraction], Applies("name", optimizers_with("betas"))] = "auto"
    """Decay of the first and second moment estimates; `auto` is as published, mostly (0.9, 0.999)."""
    alpha: Annotated[OpenFraction, Applies("name", optimizers_with("alpha"))] = 0.9
    """Decay of the mean square."""
    eps: Annotated[Auto | NonNegativeFloat, Applies("name", optimizers_with("eps"))] = "auto"
    """Added to the denominator; `auto` is as published, mostly 1e-8. Only `lars` allows 0."""
    eps_inside_sqrt: Annotated[Switch, Applies("name", ("rmsprop",))] = False
    """Add `eps` inside the root and start the mean square at 1, as TensorFlow does."""
    trust_coefficient: Annotated[
        PositiveFloat,
        Applies("name", optimizers_with("trust_coefficient")),
        Needs(("layers to scale",), _NOTHING_SCALED),
    ] = 0.001
    """Largest change of a layer in one step, as a share of its weight norm."""
    tables: Literal["same", "rowwise_adagrad", "sparse_adam"] = "same"
    """Optimizer of embedding tables (nn.EmbeddingBag): the `same` as for the rest; `rowwise_adagrad`, Adagrad with one
    number stored per row (Naumov et al. 2019); or `sparse_adam`, Adam that updates only the rows of a batch and
    needs sparse
    gradients (`model.options={sparse: true}`). Their learning rate is `lr` times that of their group."""
    options: Annotated[Options, Belongs("name")] = Field(default_factory=dict)
    """Further keyword arguments for the optimizer's class in torch or timm."""
    layer_decay: Annotated[PositiveFloat | None, Field(lt=1), Off] = None
    """Factor on the learning rate for each layer further from the output (Clark et al. 2020), or `off`."""
    groups: dict[str, ParameterGroup] = Field(default_factory=dict)
    """Settings for parameters by the first shell pattern that matches their name: {"stem.*": {lr_factor: 0.1}}.
    `classifier` is the network's last layer, whatever its name."""
    clip_norm: Annotated[PositiveFloat | None, Off] = None
    """Maximum L2 norm of the whole gradient, or `off`."""
    clip_value: Annotated[PositiveFloat | None, Off] = None
    """Maximum absolute value in the gradient, or `off`."""
    clip_adaptive: Annotated[PositiveFloat | None, Off] = None
    """Maximum norm of each output unit's gradient as a share of its weight norm (Brock et al. 2021), or `off`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.nesterov and self.momentum == 0 and not self.uses_sgd_for_rest:
            raise ValueError("found nesterov=true with momentum=0, but Nesterov momentum must be above 0")
        if self.lr_scaling != "none" and self.lr_reference_batch is None:
            raise ValueError(
                f"found lr_scaling={self.lr_scaling} without lr_reference_batch, but the rule needs the batch that lr "
                "is meant for"
            )
        self._check_own_rule()
        if self.eps == 0 and self.name != "lars":
            raise ValueError("found eps=0, but only lars divides by norms that are not 0; give a number above 0")
        self._check_rest()
        fields = {"lr", "weight_decay", "fused"}
        if self.name in RULES:
            fields |= {"momentum", "nesterov", "betas", "alpha", "trust_coeff"} | {*self.rule.keys}
        if twice := sorted(fields & self.options.keys()):
            raise ValueError(f"found options with {' and '.join(twice)}, but those are keys of this section")
        clips = [name for name in ("clip_norm", "clip_value", "clip_adaptive") if getattr(self, name) is not None]
        if len(clips) > 1:
            raise ValueError(f"found {' and '.join(clips)}, but gradients can be clipped in only one way")
        return self

    def _check_own_rule(self) -> None:
        """Refuse settings that are not passed to an optimizer of another package."""
        if self.name in RULES:
            return
        defaults = dataclasses.fields(self)
        names = {"momentum", "nesterov", "betas", "alpha", "eps", "eps_inside_sqrt", "trust_coefficient", "rest"}
        if changed := [
            each.name for each in defaults if each.name in names and getattr(self, each.name) != each.default
        ]:
            raise ValueError(
                f"found {' and '.join(changed)} with name={self.name}, but an optimizer from another package gets only "
                "lr and options; set them in options"
            )

    def _check_rest(self) -> None:
        if not self.uses_sgd_for_rest:
            return
        if self.nesterov and self.momentum * self.rest_momentum == 0:
            raise ValueError(
                "found nesterov=true with momentum=0 or rest_momentum=0, but Nesterov momentum needs both above 0"
            )
        if self.betas != "auto":
            raise ValueError(f"found betas={list(self.betas)} with rest=sgd, but they are for rest=adamw")
        if self.options:
            raise ValueError(f"found options {self.options} with rest=sgd, but they are for the class of rest=adamw")

    @property
    def rule(self) -> UpdateRule:
        """Facts about the update rule."""
        return RULES.get(self.name, UNKNOWN_RULE)

    @property
    def uses_sgd_for_rest(self) -> bool:
        """Whether filters are updated by orthogonal steps, and everything else by SGD."""
        return self.name == "muon" and self.rest == "sgd"

    def has(self, name: Literal["momentum", "betas"]) -> bool:
        """Whether the rule has such a setting."""
        return False if name == "betas" and self.uses_sgd_for_rest else name in self.rule.keys

    @property
    def has_layers_to_scale(self) -> bool:
        """Whether LARS or LAMB scales the steps of any layer: timm's versions leave out parameters without decay."""
        decays = self.weight_decay > 0 or any(each.weight_decay not in ("auto", 0) for each in self.groups.values())
        return decays or bool(self.options.get("always_adapt"))

    @property
    def moment_decay(self) -> tuple[float, float]:
        """`betas`, with defaults resolved."""
        return self.rule.betas if self.betas == "auto" else self.betas

    @property
    def denominator_eps(self) -> float:
        """`eps`, with defaults resolved."""
        return self.rule.eps if self.eps == "auto" else self.eps


_NOT_SCALED = Needs(("train.precision!=fp16",), "fp16's loss scaling skips every step whose gradient is not finite")
_RAGGED = Needs(
    ("samples of unequal length",), "no sample is padded to its neighbours, so the order does not change the cost"
)


@section
class BatchSection:
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
class TrainSection:
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
class DistillationSection:
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


_NOISY = Needs(("schedule.noise.std",), "the learning rate has no noise (schedule.noise.std)")
_WARMED_UP = Needs(("warm-up",), "there is no warm-up (schedule.warmup)")


@section
class Course:
    """A second setting of the optimizer as a function of the step."""

    name: Literal["constant", "linear", "cosine", "opposite"] = "constant"
    """`linear` and `cosine` move from the optimizer's value to `end` over the whole run; `opposite` reaches `end` at
    the peak learning rate and returns (momentum with `one_cycle`, Smith 2018)."""
    end: Annotated[NonNegativeFloat, Applies("name", ("linear", "cosine", "opposite"))] = 0.0
    """Its final value."""


@section
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


@section
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
