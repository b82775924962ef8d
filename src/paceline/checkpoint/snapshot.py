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

_Pair = tuple[Any, Any]  # where bytes go, and where they are
_MOST_THREADS = 4  # more do not raise the memory's bandwidth


class _Copy:
    """Memory for one tensor, and what such a tensor is like.

    Attributes:
        content: Its bytes, if those of a tensor of this kind lie in the same order.
    """

    def __init__(self, tensor: Tensor, kind: tuple[Any, ...]) -> None:
        self.tensor, self.kind = tensor, kind
        self.content = _bytes_of(tensor) if tensor.stride() == kind[-1] and _is_dense(tensor) else None


class HostCopies:
    """Host memory for one snapshot at a time; the next overwrites it."""

    def __init__(self) -> None:
        self._copies: dict[tuple[str, int], _Copy] = {}
        self._to_copy: list[_Pair] = []
        self._devices: set[torch.device] = set()

    def take(self, name: str, state: Any) -> Any:
        """Rebuild a component's state with every tensor in host memory, once :meth:`settle` has returned."""
        number = iter(range(2**62))
        return codec.map_tensors(state, lambda tensor: self._copy((name, next(number)), tensor.detach()))

    def settle(self) -> None:
        """Copy what is on the CPU, and wait until what other devices copy has arrived."""
        mine, *others = _shares(self._to_copy, min(available_cores(), _MOST_THREADS))
        with ThreadPoolExecutor(max(1, len(others))) as beside:
            copying = [beside.submit(_copy_all, share) for share in others]
            _copy_all(mine)
            for each in copying:
                each.result()
        self._to_copy.clear()
        for device in self._devices:
            torch.get_device_module(device).synchronize(device)
        self._devices.clear()

    def _copy(self, key: tuple[str, int], live: Tensor) -> Tensor:
        if live.layout != torch.strided or live.is_meta:
            return live  # nothing that a file could hold: it is refused by name when it is to be written
        live = live.resolve_conj().resolve_neg()
        kind = live.dtype, live.shape, live.stride()
        mine = self._copies.get(key)
        if mine is None or mine.kind != kind:
            # Page-locked for CUDA, so that the device copies by itself, and all tensors at once.
            mine = _Copy(torch.empty_like(live, device="cpu", pin_memory=live.is_cuda), kind)
            self._copies[key] = mine
        if mine.content is not None and live.device.type == "cpu":
            self._to_copy.append((mine.content, _bytes_of(live)))
            return mine.tensor
        with torch.no_grad():
            mine.tensor.copy_(live, non_blocking=live.is_cuda)
        if live.is_cuda:
            self._devices.add(live.device)
        return mine.tensor


def _shares(pairs: list[_Pair], count: int) -> list[list[_Pair]]:
    """Share copies out so that all shares have about as many bytes."""
    shares: list[list[_Pair]] = [[] for _ in range(count)]
    filled = [0] * count
    for pair in sorted(pairs, key=lambda pair: -pair[0].nbytes):
        least = filled.index(min(filled))
        shares[least].append(pair)
        filled[least] += pair[0].nbytes
    return shares


def _copy_all(pairs: list[_Pair]) -> None:
    for mine, live in pairs:
        np.copyto(mine, live)


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill one piece of memory, in whatever order."""
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def _bytes_of(tensor: Tensor) -> Any:
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
