"""How much memory did this process need at most?"""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def peak_memory_bytes(device_type: str) -> int | None:
    """Return the most memory this process held on the current device; reads counters, and makes no device wait.

    On a CPU that is resident memory. None if the device's allocator keeps no peak, as Metal's.
    """
    import torch

    match device_type:
        case "cpu":
            return peak_resident_bytes()
        case "cuda":
            return torch.cuda.max_memory_allocated()
        case "xpu":
            return int(torch.xpu.max_memory_allocated())
    return None


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
