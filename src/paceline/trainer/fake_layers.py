"""Which module is at work in a forward pass, and whose gradient is an operation of the backward pass?

Autograd numbers what it makes for the backward pass in the order of the forward pass. Which module was at work when it
came to a number tells whose gradient a node computes: also inside modules that are made of others, for operations in
place, which have several nodes, and for those that no module ends with.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import torch
from torch import nn

from paceline.models.flops import next_node_number


class ForwardLayers:
    """Follows the modules of a network by hooks, which stay.

    Args:
        network: Whose modules are told apart.
    """

    def __init__(self, network: nn.Module) -> None:
        self._within: list[str] = []
        # From which number on which module was at work.
        self._numbers, self._names = [0], [""]
        self._owners: dict[int, str] = {}
        for name, module in network.named_modules():
            self._owners |= {id(each): name for each in module.parameters(recurse=False)}
            if name:
                module.register_forward_pre_hook(lambda *_, name=name: self._enter(name))
                module.register_forward_hook(lambda *_: self._leave())

    @property
    def at_work(self) -> str:
        """The innermost module that is in its forward pass; empty if none is."""
        return self._within[-1] if self._within else ""

    def of_backward(self) -> str:
        """The module whose gradient is computed; in a second forward pass amid it, the one at work."""
        node: Any = torch._C._current_autograd_node()  # noqa: SLF001  # torch.utils.checkpoint asks so
        if node is None or self._within:
            return self.at_work
        if type(node).__name__ == "AccumulateGrad":
            return self._owners.get(id(node.variable), "")
        place = bisect_right(self._numbers, node._sequence_nr())  # noqa: SLF001  # torch.fx asks so
        return self._names[place - 1]

    def leave_all(self) -> None:
        """Be in no module."""
        self._within.clear()
        self._note()

    def _enter(self, name: str) -> None:
        self._within.append(name)
        self._note()

    def _leave(self) -> None:
        if self._within:
            self._within.pop()
        self._note()

    def _note(self) -> None:
        number = next_node_number()
        if self._numbers[-1] == number:
            self._names[-1] = self.at_work
        else:
            self._numbers.append(number)
            self._names.append(self.at_work)
