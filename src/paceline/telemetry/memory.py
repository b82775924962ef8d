"""How much memory did this process need at most?"""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PeakMemory:
    """Peaks since the process began, or since the allocator's statistics were last reset.

    Attributes:
        allocated_bytes: Held by tensors on a GPU; resident memory of the process on a CPU.
        reserved_bytes: Held by PyTorch's allocator on a GPU; the same as allocated on a CPU.
    """

    allocated_bytes: int
    reserved_bytes: int

    def to_json(self) -> dict[str, int]:
        """Return the peaks under the names used in records."""
        return {
            "peak_memory_allocated_bytes": self.allocated_bytes,
            "peak_memory_reserved_bytes": self.reserved_bytes,
        }


def peak_memory(device_type: str) -> PeakMemory:
    """Return the peaks on the current device; reads counters, and makes no device wait."""
    if device_type == "cuda":
        import torch

        return PeakMemory(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    resident = peak_resident_bytes()
    return PeakMemory(resident, resident)


def peak_resident_bytes() -> int:
    """Return the most main memory this process had at once, its children not counted."""
    # Not getrusage where there is a choice: on Linux it begins at the peak of the process that forked.
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, others KiB
