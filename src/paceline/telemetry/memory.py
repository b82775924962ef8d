"""Peak memory of this process."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def peak_memory_bytes(device_type: str) -> int | None:
    """Return the peak memory of this process on the current device; reads counters without synchronising.

    On a CPU that is resident memory. None if the device's allocator does not record a peak, as for Metal.
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
    """Return the peak main memory of this process, without its children."""
    # Avoid getrusage where possible: on Linux it starts at the peak of the parent that forked this process.
    if resident := peak_resident_of("self"):
        return resident
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, others KiB


def peak_resident_of(process: int | str) -> int:
    """Return the peak main memory of another process; 0 if it has ended or is unknown."""
    return _read_proc_status(process).get("VmHWM", 0)


def peak_private_of(process: int | str) -> int:
    """Return the same without pages of files, mostly libraries: how many are resident varies on its own."""
    status = _read_proc_status(process)
    return max(0, status.get("VmHWM", 0) - status.get("RssFile", 0))


def private_bytes() -> int:
    """Return the current main memory of this process, without pages of files; its peak if unknown."""
    status = _read_proc_status("self")
    return status["VmRSS"] - status.get("RssFile", 0) if "VmRSS" in status else peak_resident_bytes()


def _read_proc_status(process: int | str) -> dict[str, int]:
    """Return Linux's memory values of a process, in bytes; empty if the process is gone, or on another system."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    fields = [line.split() for line in lines if line.endswith(" kB")]
    return {name.removesuffix(":"): int(count) * 1024 for name, count, _ in fields}
