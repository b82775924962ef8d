"""What does this machine lend to a process: cores and memory, and what is its processor?"""

from __future__ import annotations

import os
import platform
from pathlib import Path


def available_cores() -> int:
    """Cores this process may run on (respects affinity and, on Linux, cpusets)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int | None:
    """Main memory of the machine, or None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def cpu_name() -> str:
    """What the processor calls itself, where the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model"):
                return value.strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def cache_folder() -> Path:
    """Where what can be found out again is kept between runs (XDG Base Directory Specification); it may not exist."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if Path(home).is_absolute() else Path.home() / ".cache") / "paceline"
