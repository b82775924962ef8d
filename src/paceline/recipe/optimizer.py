"""The recipe's `optimizer` section: the update rule, and which parameters it treats differently."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from paceline.optimizers import RULES, UNKNOWN_RULE, Rule, optimizers_with
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
    "{optimizer} scales the steps of decaying parameters, and with optimizer.weight_decay=0 there are none, so it acts "
    "like {unscaled}; give a weight decay, or optimizer.options={{always_adapt: true}}"
)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ParameterGroup:
    """Settings of a parameter group that differ from the rest."""

    lr_factor: NonNegativeFloat = 1.0
    """Their learning rate, as a factor on the schedule's."""
    weight_decay: Auto | NonNegativeFloat = "auto"
    """Their weight decay, 0 for none; `auto` does not change it."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
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
    def rule(self) -> Rule:
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
