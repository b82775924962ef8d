"""What of a network couples the samples of a batch or draws random numbers, and how is it put to rest?"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@dataclass(frozen=True)
class Dropout:
    """A place where a network drops something, at random.

    Attributes:
        name: The module's name in the network.
        module: The module.
        attribute: Which of its numbers is the probability.
        probability: What it is.
    """

    name: str
    module: nn.Module
    attribute: str
    probability: float

    @property
    def is_layer(self) -> bool:
        """Whether the module is there for dropping and nothing else."""
        return _is_layer(self.module)

    @property
    def title(self) -> str:
        """What it is called in messages."""
        return self.name if self.is_layer else f"{self.name}.{self.attribute}".lstrip(".")

    def is_around(self, name: str) -> bool:
        """Whether a module lies within this one."""
        return not self.name or name.startswith(f"{self.name}.")

    def set(self, probability: float) -> None:
        """Drop with another probability."""
        setattr(self.module, self.attribute, probability)


def dropouts(network: nn.Module) -> list[Dropout]:
    """Where a network drops with a probability between 0 and 1, whether in a module for that or by an attribute."""
    return [
        Dropout(name, module, attribute, value)
        for name, module in network.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, float) and 0 < value < 1 and _is_dropout(module, attribute)
    ]


def _is_dropout(module: nn.Module, attribute: str) -> bool:
    return "drop" in attribute or (_is_layer(module) and attribute in ("p", "rate", "prob", "probability"))


def _is_layer(module: nn.Module) -> bool:
    kind = type(module).__name__.lower()
    return ("drop" in kind or "stochastic" in kind) and not any(True for _ in module.parameters())


def norms(network: nn.Module) -> dict[str, nn.Module]:
    """The BatchNorm layers that normalise by the statistics of their micro-batch, by name."""
    return {
        name: module for name, module in network.named_modules() if isinstance(module, _BatchNorm) and module.training
    }


def put_to_rest(network: nn.Module, statistics: Mapping[str, Tensor]) -> None:
    """Stop dropouts, and let BatchNorm normalise by fixed statistics.

    Args:
        network: What is changed.
        statistics: Buffers by name, to be taken first.
    """
    for each in dropouts(network):
        each.set(0.0)
    buffers = dict(network.named_buffers())
    for name, value in statistics.items():
        buffers[name].copy_(value)
    for module in norms(network).values():
        module.eval()
        # A method of the module itself, so that copies of the network are at rest too.
        module.train = types.MethodType(_stay, module)  # type: ignore[method-assign]


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    return module


def shake(network: nn.Module) -> None:
    """Move every weight at random: what begins at zero would hide what goes on before it."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_((0.1 * noise).to(parameter.dtype))
