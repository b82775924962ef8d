"""The optimizers that a recipe can name: class, recipe keys and memory of each.

A built-in optimizer is an entry of :data:`RULES`, which names its class. All others of torch and timm use their names
there; like those of other packages, they take only ``lr`` and ``optimizer.options``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """An update rule.

    Attributes:
        reference: Its class.
        keys: The keys of the recipe's ``optimizer`` section that it takes.
        state_numbers: Numbers that it stores for each parameter, without that for ``momentum``.
        betas: The authors' default.
        eps: The authors' default.
        fixed: Additional arguments of its class.
        is_adaptive: Whether it divides each step by the gradient's size, so that noise does not shorten it.
        has_momentum: Whether it has momentum, or a first beta.
        unscaled: The optimizer it acts like where it scales no layers; empty if it never scales any.
    """

    reference: str
    keys: tuple[str, ...] = ()
    state_numbers: int = 2
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    fixed: Mapping[str, Any] = field(default_factory=dict)
    is_adaptive: bool = True
    has_momentum: bool = True
    unscaled: str = ""


RULES = {
    "sgd": UpdateRule(reference="torch.optim:SGD", keys=("momentum", "nesterov"), state_numbers=0, is_adaptive=False),
    "adamw": UpdateRule(reference="torch.optim:AdamW", keys=("betas", "eps")),
    "rmsprop": UpdateRule(reference="torch.optim:RMSprop", keys=("momentum", "alpha", "eps"), state_numbers=1),
    "adafactor": UpdateRule(reference="torch.optim:Adafactor", state_numbers=0, has_momentum=False),
    # LAMB's own clipping is off: gradients are clipped only by optimizer.clip_norm.
    "lamb": UpdateRule(
        reference="timm.optim:Lamb",
        keys=("betas", "eps"),
        eps=1e-6,
        fixed={"max_grad_norm": None},
        unscaled="adamw",
    ),
    "lars": UpdateRule(
        reference="timm.optim:Lars",
        keys=("momentum", "nesterov", "trust_coefficient", "eps"),
        state_numbers=0,
        is_adaptive=False,
        unscaled="sgd",
    ),
    "lion": UpdateRule(reference="timm.optim:Lion", keys=("betas",), state_numbers=1, betas=(0.9, 0.99)),
    "muon": UpdateRule(
        reference="timm.optim:Muon",
        keys=("momentum", "nesterov", "betas"),
        state_numbers=1,
        betas=(0.9, 0.95),
        is_adaptive=False,
    ),
}
UNKNOWN_RULE = UpdateRule(reference="", is_adaptive=False)
"""Assumed of any other optimizer: it keeps as much state as Adam, and takes none of the keys."""


def optimizers_with(key: str) -> tuple[str, ...]:
    """Return the names of built-in optimizers that take a key of the recipe."""
    return tuple(name for name, rule in RULES.items() if key in rule.keys)


_TORCH_OPTIMIZERS = ("Adadelta", "Adagrad", "Adam", "Adamax", "ASGD", "NAdam", "RAdam", "Rprop")
# Optimizers that timm's own factory creates by name, except those of Apex and bitsandbytes, and Adahessian, which needs
# second derivatives.
_OF_TIMM = (
    "adabelief adafactorbv adafactorbvc adamc adamp adamuon adamwlegacy adan adanw adopt adoptc adoptw cadafactor "
    "cadafactorbv cadafactorbvc cadamc cadamp cadamw cadan cadanw cadopt cadoptc cadoptw clamb clambw claprop clion "
    "clionc cmars cnadamc cnadamw crmsproptf csgdc csgdp csgdw kron kronc kronw lambc lambcd lambcw lambw laprop "
    "lapropc larc lionc madgrad madgradw mars momentum nadamc nadamlegacy nadamuon nadamw nesterov nesterovw nlarc "
    "nlars nmuon novograd novogradc novogradw radabelief radamlegacy radamw rmsproptf rmsproptfc rmsproptfw "
    "sgdc sgdp sgdw"
)
LIBRARY_OPTIMIZERS = {name.lower(): f"torch.optim:{name}" for name in _TORCH_OPTIMIZERS}
LIBRARY_OPTIMIZERS |= {name: f"paceline.optim.of_timm:{name}" for name in _OF_TIMM.split()}
"""References of the other optimizers of torch and timm, by name."""
OF_MATRICES = tuple(name for name in (*RULES, *LIBRARY_OPTIMIZERS) if re.search("adafactor|muon|kron", name))
"""Optimizers that need whole matrices, which FSDP shards."""
UNSUPPORTED_OPTIMIZERS = {
    "lbfgs": "it computes the loss several times a step, and a training step computes it once; use adamw or sgd",
    "sparseadam": "it takes only sparse gradients; for embedding tables set optimizer.tables=sparse_adam",
    "adahessian": "it needs second derivatives, which a training step does not compute; use adamw",
}
"""Why known optimizers are not supported, by name in lower case."""
