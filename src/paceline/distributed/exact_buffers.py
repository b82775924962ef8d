"""What becomes of a network's buffers in an exact step, where every logical rank starts from the same ones?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.distributed.collectives import Collectives

# BatchNorm counts its forward passes in it; one per step wherever they happen.
_COUNTER = "num_batches_tracked"


def buffers_of(network: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Every buffer once, with the module that holds it and its name there."""
    seen: set[int] = set()
    for module in network.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if id(buffer) not in seen:
                seen.add(id(buffer))
                yield module, name, buffer


@contextmanager
def buffers_kept(network: nn.Module) -> Iterator[None]:
    """After passes that are no steps, also after an error: every buffer is where it was, with what it was."""
    places = [(*place, place[-1].clone()) for place in buffers_of(network)]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, before in places:
                put_back(module, name, buffer)
                buffer.copy_(before)


def put_back(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Bring a buffer's value into the tensor that held it, where a forward pass has put another in its place."""
    now = getattr(module, name)
    if now is not tensor:
        with torch.no_grad():
            tensor.copy_(now)
        setattr(module, name, tensor)


class StepBuffers:
    """A network's buffers from the beginning of a step to its end.

    Numbers that forward passes move (running statistics) end as they were plus the weighted mean of their changes.
    Others, whose differences mean nothing (integers, flags, complex numbers, and what holds infinities when the
    network is built, as a mask does), end as logical rank 0 has left them.

    Attributes:
        summed: The buffers whose changes are added up.
    """

    def __init__(self, network: nn.Module, collectives: Collectives) -> None:
        self._places = list(buffers_of(network))
        self._all = [tensor for _, _, tensor in self._places]
        self._before = [torch.empty_like(tensor) for tensor in self._all]
        numbers = [each.is_floating_point() and bool(each.isfinite().all()) for each in self._all]
        self.summed = [tensor for tensor, is_number in zip(self._all, numbers, strict=True) if is_number]
        self._summed_before = [was for was, is_number in zip(self._before, numbers, strict=True) if is_number]
        self._led = [tensor for tensor, is_number in zip(self._all, numbers, strict=True) if not is_number]
        self._led_after = [torch.empty_like(each) for each in self._led]
        self._is_told = any(
            name != _COUNTER for (_, name, _), is_number in zip(self._places, numbers, strict=True) if not is_number
        )
        self._collectives = collectives

    def begin(self) -> None:
        """Remember where the step starts."""
        _copy(self._before, self._all)

    def start_again(self) -> None:
        """Give the next logical rank what the step started from."""
        _copy(self._all, self._before)

    def leave(self, logical_rank: int, changes: list[Tensor], share: float) -> None:
        """Write a logical rank's share of the changes into ``changes``, in the order of :attr:`summed`."""
        self.put_back()
        if self.summed:
            _copy(changes, self.summed)
            torch._foreach_sub_(changes, self._summed_before)
            torch._foreach_mul_(changes, share)
        if logical_rank == 0:
            _copy(self._led_after, self._led)

    def put_back(self) -> None:
        """Undo that a forward pass has put another tensor in a buffer's place; its value stays."""
        for module, name, tensor in self._places:
            put_back(module, name, tensor)

    def end(self, changes: list[Tensor]) -> None:
        """Make the buffers the step's; a collective for networks with buffers that logical rank 0 decides."""
        if self.summed:
            _copy(self.summed, self._summed_before)
            torch._foreach_add_(self.summed, changes)
        if self._is_told:
            if self._collectives.world.is_first:
                _copy(self._led, self._led_after)
            self._collectives.broadcast_tensors(self._led)


def _copy(targets: list[Tensor], sources: list[Any]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
