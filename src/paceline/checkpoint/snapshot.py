"""How is a run's state taken to host memory in the least time?

Into memory that was there for the last snapshot: new memory costs a page fault for every few thousand bytes, which
takes longer than the copy. One copy of the state is therefore held from the first save to the end of the run.

On the CPU the copies are shared out among threads of Python's, which memory copies run in parallel. torch would cut
each single copy into parts and wait for the slowest of its threads, hundreds of times over: on a machine that does
other work beside, that costs many times as much.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.checkpoint import codec
from paceline.machine import available_cores

_MOST_THREADS = 4  # more do not raise the memory's bandwidth


class HostCopies:
    """Host memory for one snapshot at a time; the next overwrites it."""

    def __init__(self) -> None:
        self._copies: dict[tuple[str, int], Tensor] = {}
        self._to_copy: list[tuple[Any, Any]] = []
        self._devices: set[torch.device] = set()

    def take(self, name: str, state: Any) -> Any:
        """Rebuild a component's state with every tensor in host memory, once :meth:`settle` has returned."""
        number = iter(range(2**62))
        return codec.map_tensors(state, lambda tensor: self._copy((name, next(number)), tensor.detach()))

    def settle(self) -> None:
        """Copy what is on the CPU, and wait until what other devices copy has arrived."""
        threads = min(available_cores(), _MOST_THREADS)
        shares: list[list[tuple[Any, Any]]] = [[] for _ in range(threads)]
        filled = [0] * threads
        for pair in sorted(self._to_copy, key=lambda pair: -pair[0].nbytes):
            least = filled.index(min(filled))
            shares[least].append(pair)
            filled[least] += pair[0].nbytes
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(_copy_all, shares))
        self._to_copy.clear()
        for device in self._devices:
            torch.get_device_module(device).synchronize(device)
        self._devices.clear()

    def _copy(self, key: tuple[str, int], live: Tensor) -> Tensor:
        mine = self._copies.get(key)
        if mine is None or _kind(mine) != _kind(live):
            # Page-locked for CUDA, so that the device copies by itself, and all tensors at once.
            mine = torch.empty_like(live, device="cpu", pin_memory=live.is_cuda)
            self._copies[key] = mine
        if live.device.type == "cpu" and mine.stride() == live.stride() and _is_dense(live):
            self._to_copy.append((_bytes_of(mine), _bytes_of(live)))
            return mine
        with torch.no_grad():
            mine.copy_(live, non_blocking=live.is_cuda)
        if live.is_cuda:
            self._devices.add(live.device)
        return mine


def _copy_all(pairs: list[tuple[Any, Any]]) -> None:
    for mine, live in pairs:
        np.copyto(mine, live)


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill one piece of memory, in whatever order."""
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def _bytes_of(tensor: Tensor) -> Any:
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
