"""How is a run's state taken to host memory in the least time?

Into memory that was there for the last snapshot: new memory costs a page fault for every few thousand bytes, which
takes longer than the copy. One copy of the state is therefore held from the first save to the end of the run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint import codec


class HostCopies:
    """Host memory for one snapshot at a time; the next overwrites it."""

    def __init__(self) -> None:
        self._copies: dict[tuple[str, int], Tensor] = {}
        self._devices: set[torch.device] = set()

    def take(self, name: str, state: Any) -> Any:
        """Rebuild a component's state with every tensor in host memory; call :meth:`settle` before it is read."""
        number = iter(range(2**62))
        return codec.map_tensors(state, lambda tensor: self._copy((name, next(number)), tensor))

    def settle(self) -> None:
        """Wait until every copy has arrived: the one wait for the device."""
        for device in self._devices:
            torch.get_device_module(device).synchronize(device)
        self._devices.clear()

    def _copy(self, key: tuple[str, int], tensor: Tensor) -> Tensor:
        with torch.no_grad():
            live = tensor.detach()
            mine = self._copies.get(key)
            if mine is None or _kind(mine) != _kind(live):
                # Page-locked for CUDA, so that the device copies by itself, and all tensors at once.
                mine = torch.empty_like(live, device="cpu", pin_memory=live.is_cuda)
                self._copies[key] = mine
            mine.copy_(live, non_blocking=live.is_cuda)
            if live.is_cuda:
                self._devices.add(live.device)
            return mine


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()
