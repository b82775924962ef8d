"""Peak memory of this process."""

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
    if told := peak_resident_of("self"):
        return told
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, others KiB


def peak_resident_of(process: int | str) -> int:
    """Return the most main memory that another process had at once; 0 if it has ended or is unknown."""
    return _told(process).get("VmHWM", 0)


def peak_private_of(process: int | str) -> int:
    """Return the same without the pages of files, libraries above all: how many of them are there changes by itself."""
    told = _told(process)
    return max(0, told.get("VmHWM", 0) - told.get("RssFile", 0))


def private_bytes() -> int:
    """Return the main memory that this process has now, without pages of files; its peak if unknown."""
    told = _told("self")
    return told["VmRSS"] - told.get("RssFile", 0) if "VmRSS" in told else peak_resident_bytes()


def _told(process: int | str) -> dict[str, int]:
    """What Linux says of a process's memory, in bytes; nothing if it is gone, or the system is another."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    words = [line.split() for line in lines if line.endswith(" kB")]
    return {name.removesuffix(":"): int(count) * 1024 for name, count, _ in words}
