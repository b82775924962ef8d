"""How do weights that no process holds all of get their first values?

A network without numbers is filled one module at a time, and the module is cut up before the next one is filled. So a
process never holds more than its parts and one module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from paceline.distributed.collectives import Collectives

ValueOf = Callable[[str], Tensor]
"""The first values of a parameter, a buffer or another tensor of a network, by its name, on the CPU."""


class Filling:
    """Gives a network without numbers, and its average, their first values.

    Args:
        value_of: What they are; None for a network that has its own, which is then left as it is.
        network: The network.
        average: The average of its weights, which begins with the same.
        collectives: The processes; the first one's values are everyone's.
        device: Where they are to be.
    """

    def __init__(
        self,
        value_of: ValueOf | None,
        network: nn.Module,
        average: nn.Module | None,
        collectives: Collectives,
        device: torch.device,
    ) -> None:
        self._value_of = value_of
        self._networks = (network,) if average is None else (network, average)
        self._collectives, self._device = collectives, device

    def __call__(self, name: str) -> None:
        """Fill the module of this name, but for what in it is filled and cut up already; a collective."""
        if self._value_of is None:
            return
        network, *others = (each.get_submodule(name) for each in self._networks)
        for path, owners in _unfilled(network):
            value = self._value_of(f"{name}.{path}" if name else path).to(self._device)
            # Code of the user's own may have drawn other ones on another process.
            self._collectives.broadcast_tensors([value])
            for module in (network, *others):
                _put(module, owners, value if module is network else value.clone())


def _unfilled(module: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """Each tensor without numbers: its first name, and all of its names, which are several where it is shared."""
    names: dict[int, list[str]] = {}
    for path, each in module.named_modules():
        # Shared ones by each of their names, and plain attributes, which torch lists nowhere.
        own = (
            *each.named_parameters(recurse=False, remove_duplicate=False),
            *each.named_buffers(recurse=False, remove_duplicate=False),
            *vars(each).items(),
        )
        for name, tensor in own:
            if isinstance(tensor, Tensor) and tensor.is_meta:
                names.setdefault(id(tensor), []).append(f"{path}.{name}" if path else name)
    yield from [(found[0], found) for found in names.values()]


def _put(module: nn.Module, names: list[str], value: Tensor) -> None:
    made: Any = None
    for name in names:
        path, _, last = name.rpartition(".")
        owner = module.get_submodule(path)
        before = getattr(owner, last)
        if made is None:
            made = value
            if isinstance(before, nn.Parameter):
                made = nn.Parameter(value, requires_grad=before.requires_grad)
                for key, said in vars(before).items():
                    setattr(made, key, said)
        setattr(owner, last, made)
