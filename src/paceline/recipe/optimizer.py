"""The recipe's `optimizer` section: the update rule, and which parameters it treats differently."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from paceline.optimizers import OTHER, RULES, Rule, taking
from paceline.recipe.fields import (
    STRICT,
    Applies,
    Auto,
    Belongs,
    Names,
    Needs,
    NonNegativeFloat,
    Off,
    OpenFraction,
    Options,
    PositiveFloat,
    PositiveInt,
    Switch,
)

CLASSIFIER = "classifier"
"""The pattern of `groups` that stands for the network's classifier."""
_NOTHING_SCALED = (
    "{optimizer} scales the steps of what decays, and with optimizer.weight_decay=0 that is nothing, so that it moves "
    "like {unscaled}; give a weight decay, or optimizer.options={{always_adapt: true}}"
)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ParameterGroup:
    """What some parameters get instead of what all others get."""

    lr_factor: NonNegativeFloat = 1.0
    """Their learning rate, as a factor on the schedule's."""
    weight_decay: Auto | NonNegativeFloat = "auto"
    """Their weight decay, 0 for none; `auto` leaves them what they would have had."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Optimizer:
    """The update rule."""

    name: Annotated[str, Names(tuple(RULES), "optimizers"), Needs(("layers to scale",), _NOTHING_SCALED)] = "sgd"
    """`sgd` (with momentum), `adamw` (Loshchilov and Hutter 2017), `rmsprop` (Tieleman and Hinton 2012), `adafactor`
    (Shazeer and Stern 2018), `lamb` (You et al. 2019), `lars` (You et al. 2017), `lion` (Chen et al. 2023), or `muon`
    (Jordan et al. 2024; what is not a matrix by `rest`); any other of torch.optim or timm (`nadamw`), a name that an
    installed package registers, or `package.module:factory` of your own, all called with parameter groups, `lr` and
    `options`."""
    lr: PositiveFloat = 0.1
    """Peak learning rate, for the global batch as given: it is never scaled silently."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiply `lr` by the global batch over `lr_reference_batch` (Goyal et al. 2017), or by its square root
    (Krizhevsky 2014)."""
    lr_reference_batch: Annotated[PositiveInt | None, Off, Applies("lr_scaling", ("linear", "sqrt"))] = None
    """The global batch that `lr` is meant for."""
    weight_decay: NonNegativeFloat = 0.0
    """Decay towards zero: added to the gradient (`sgd`, `rmsprop`, `lars`), to the update before its norm is set
    (`lamb`), or taken off the weights themselves (the others)."""
    decay_norm_and_bias: Annotated[
        Switch, Needs(("optimizer.weight_decay",), "with optimizer.weight_decay=0 nothing decays")
    ] = False
    """Whether weight decay also acts on biases and normalisation parameters."""
    momentum: Annotated[OpenFraction, Applies("name", taking("momentum"))] = 0.9
    """Momentum coefficient; `muon`'s author uses 0.95."""
    nesterov: Annotated[Switch, Applies("name", taking("nesterov"))] = False
    """Nesterov's form of momentum."""
    rest: Annotated[Literal["adamw", "sgd"], Applies("name", ("muon",))] = "adamw"
    """What moves what `muon` does not: `adamw`, all that is no matrix or filter; or `sgd` with momentum, all that is no
    filter, classifiers too, as in the public CIFAR-10 record (Jordan 2024)."""
    rest_lr_factor: Annotated[PositiveFloat, Applies("rest", ("sgd",))] = 1.0
    """Its learning rate, as a factor on the schedule's; those of `groups` come on top."""
    rest_momentum: Annotated[OpenFraction, Applies("rest", ("sgd",))] = 0.9
    """Its momentum coefficient; `nesterov` is for both."""
    newton_schulz_steps: Annotated[PositiveInt, Applies("rest", ("sgd",))] = 5
    """Iterations that make a step orthogonal; the CIFAR-10 record does with 3."""
    unit_filters: Annotated[Switch, Applies("rest", ("sgd",))] = False
    """Scale each bank of filters to a norm of the root of its outputs before every step: weight decay, which only
    shrinks, then has no effect on filters."""
    betas: Annotated[Auto | tuple[OpenFraction, OpenFraction], Applies("name", taking("betas"))] = "auto"
    """Decay of the first and second moment estimates; `auto`: (0.9, 0.999), (0.9, 0.99) for `lion`, (0.9, 0.95) for
    `muon`."""
    alpha: Annotated[OpenFraction, Applies("name", taking("alpha"))] = 0.9
    """Decay of the mean square."""
    eps: Annotated[Auto | NonNegativeFloat, Applies("name", taking("eps"))] = "auto"
    """Added to the denominator; `auto`: 1e-8, and 1e-6 for `lamb`. Only that of `lars` may be 0."""
    eps_inside_sqrt: Annotated[Switch, Applies("name", ("rmsprop",))] = False
    """Add `eps` under the root and let the mean square begin at 1, as TensorFlow does."""
    trust_coefficient: Annotated[
        PositiveFloat,
        Applies("name", taking("trust_coefficient")),
        Needs(("layers that lars scales",), _NOTHING_SCALED),
    ] = 0.001
    """Share of a layer's weight norm that one step may move it by."""
    tables: Literal["same", "rowwise_adagrad", "sparse_adam"] = "same"
    """What moves embedding tables (nn.EmbeddingBag): the `same` as all else; `rowwise_adagrad`, Adagrad with one number
    kept for each row (Naumov et al. 2019); or `sparse_adam`, Adam that moves only the rows of a batch and needs sparse
    gradients (`model.options={sparse: true}`). Their learning rate is `lr` times that of their group."""
    options: Annotated[Options, Belongs("name")] = Field(default_factory=dict)
    """Further keyword arguments for the optimizer's class in torch or timm."""
    layer_decay: Annotated[PositiveFloat | None, Field(lt=1), Off] = None
    """Factor on the learning rate for each layer further from the output (Clark et al. 2020), or `off`."""
    groups: dict[str, ParameterGroup] = Field(default_factory=dict)
    """Settings for parameters whose name matches a shell pattern, the first that does: {"stem.*": {lr_factor: 0.1}}.
    `classifier` is the network's last layer, whatever its name."""
    clip_norm: Annotated[PositiveFloat | None, Off] = None
    """Largest L2 norm of the whole gradient, or `off`."""
    clip_value: Annotated[PositiveFloat | None, Off] = None
    """Largest absolute value of any number of the gradient, or `off`."""
    clip_adaptive: Annotated[PositiveFloat | None, Off] = None
    """Largest norm of each output unit's gradient as a share of its weights' norm (Brock et al. 2021), or `off`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.name in ("sgd", "lars") and self.nesterov and self.momentum == 0:
            raise ValueError("found nesterov=true with momentum=0, but Nesterov's form needs a momentum above 0")
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
            fields |= {"momentum", "nesterov", "betas", "alpha", "trust_coeff"}
            fields |= set() if self.name == "adafactor" else {"eps"}
        if twice := sorted(fields & self.options.keys()):
            raise ValueError(f"found options with {' and '.join(twice)}, but those are keys of this section")
        clips = [name for name in ("clip_norm", "clip_value", "clip_adaptive") if getattr(self, name) is not None]
        if len(clips) > 1:
            raise ValueError(f"found {' and '.join(clips)}, but gradients are clipped in one way")
        return self

    def _check_own_rule(self) -> None:
        """Refuse settings that an optimizer of another package is not given."""
        if self.name in RULES:
            return
        usual = dataclasses.fields(self)
        names = {"momentum", "nesterov", "betas", "alpha", "eps", "eps_inside_sqrt", "trust_coefficient", "rest"}
        if changed := [each.name for each in usual if each.name in names and getattr(self, each.name) != each.default]:
            raise ValueError(
                f"found {' and '.join(changed)} with name={self.name}, but an optimizer of another package is given lr "
                "and options only; set them in options"
            )

    def _check_rest(self) -> None:
        if not self.moves_rest_by_sgd:
            return
        if self.nesterov and self.momentum * self.rest_momentum == 0:
            raise ValueError(
                "found nesterov=true with momentum=0 or rest_momentum=0, but Nesterov's form needs both above 0"
            )
        if self.betas != "auto":
            raise ValueError(f"found betas={list(self.betas)} with rest=sgd, but they are for rest=adamw")
        if self.options:
            raise ValueError(f"found options {self.options} with rest=sgd, but they are for the class of rest=adamw")

    @property
    def rule(self) -> Rule:
        """What is known of the update rule."""
        return RULES.get(self.name, OTHER)

    @property
    def moves_rest_by_sgd(self) -> bool:
        """Whether filters move by orthogonal steps, and everything else by SGD."""
        return self.name == "muon" and self.rest == "sgd"

    def has(self, name: Literal["momentum", "betas"]) -> bool:
        """Whether the rule has such a setting."""
        if name == "betas" and self.moves_rest_by_sgd:
            return False
        return name in self.rule.takes

    @property
    def has_layers_to_scale(self) -> bool:
        """Whether LARS or LAMB scales the steps of any layer: timm's leave out what does not decay."""
        decays = self.weight_decay > 0 or any(each.weight_decay not in ("auto", 0) for each in self.groups.values())
        return decays or bool(self.options.get("always_adapt"))

    @property
    def moment_decay(self) -> tuple[float, float]:
        """`betas`, where they are left open too."""
        return self.rule.betas if self.betas == "auto" else self.betas

    @property
    def denominator_eps(self) -> float:
        """`eps`, where it is left open too."""
        return self.rule.eps if self.eps == "auto" else self.eps
