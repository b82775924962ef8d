"""What can the CPU that this runs on do: its matrix products and its memory, measured once and remembered?"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from paceline.data.disk_cache import remember
from paceline.devices import Device
from paceline.machine import available_cores, cache_folder, cpu_name, memory_bytes
from paceline.plain_json import load_json

_SIZE = 1536
_COPIED_BYTES = 256 * 2**20
_SECONDS = 0.35
_FEWEST = 3
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def this_cpu() -> Device:
    """This CPU as a device whose peaks are what it reached here, in a second or two; remembered if it can be.

    A matrix product of 1,536 squared stands for its arithmetic and a copy of 256 MiB for its memory: both are what
    programs get, and a little less than what the maker would print.
    """
    path = _path()
    found = _recall(path)
    if found is None:
        found = {
            "flops_per_second": {name: _product_rate(each) for name, each in _TYPES.items()},
            "bytes_per_second": _copy_rate(),
            "measured": time.strftime("%Y-%m-%d"),
        }
        remember(path, json.dumps(found).encode())
    cores = available_cores()
    how = "a matrix product of 1,536 squared, a copy of 256 MiB"
    return Device(
        name="cpu",
        title=f"{cpu_name()} ({cores} core{'s' * (cores > 1)})",
        memory_bytes=memory_bytes() or 0,
        bytes_per_second=found["bytes_per_second"],
        flops_per_second=MappingProxyType(found["flops_per_second"]),
        multiprocessors=cores,
        reported_as="",
        source=f"measured here on {found['measured']}: {how}; kept in {path}",
    )


def _product_rate(dtype: torch.dtype) -> float:
    """FLOP/s of the best of some matrix products."""
    # Numbers of its own: random states stay as they are.
    numbers = torch.randn(2, _SIZE, _SIZE, generator=torch.Generator().manual_seed(0))
    left, right = numbers.to(dtype)
    out = torch.empty(_SIZE, _SIZE, dtype=dtype)
    return 2 * _SIZE**3 / _least_seconds(lambda: torch.mm(left, right, out=out))


def _copy_rate() -> float:
    """Bytes per second, read and written, of the best of some copies that no cache holds."""
    source, target = torch.ones(2, _COPIED_BYTES // 4)
    return 2 * _COPIED_BYTES / _least_seconds(lambda: target.copy_(source))


def _least_seconds(act: Callable[[], Any]) -> float:
    """Of some goes; what else the machine does only adds."""
    act()
    times: list[float] = []
    ends = time.perf_counter() + _SECONDS
    while len(times) < _FEWEST or time.perf_counter() < ends:
        begun = time.perf_counter()
        act()
        times.append(time.perf_counter() - begun)
    return min(times)


def _path() -> Path:
    same = (cpu_name(), available_cores(), torch.get_num_threads(), torch.__version__)
    return cache_folder() / "roofline" / f"{hashlib.sha256(repr(same).encode()).hexdigest()[:16]}.json"


def _recall(path: Path) -> dict[str, Any] | None:
    try:
        found = load_json(path.read_bytes())
        rates = {name: float(found["flops_per_second"][name]) for name in _TYPES}
        told = {"bytes_per_second": float(found["bytes_per_second"]), "measured": str(found["measured"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return {**told, "flops_per_second": rates}
