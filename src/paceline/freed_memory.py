"""How does a process keep what one step frees for the next, instead of asking the system for it again?

The C library gives large pieces back to the system as soon as they are freed, and each step's activations are such
pieces: their pages are then taken away, zeroed and mapped anew in every step, which can take longer than computing
them. ``docs/decisions/0069-freed-memory-is-kept.md`` has the figures.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_NEVER = -1
_OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")


def keep_freed_memory() -> bool:
    """Let this process, and those that it forks, keep freed memory; returns whether that was done.

    Only on Linux with glibc, and not where its environment already says how it is to allocate: then that holds. It
    cannot be undone, as glibc adapts its thresholds by itself only until the first of them is set.
    """
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc" or _is_told(os.environ.get("GLIBC_TUNABLES", "")):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Large pieces come from the heap, which reuses what lies free in it, and whose free end stays.
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))


def _is_told(tunables: str) -> bool:
    return "glibc.malloc." in tunables or any(name in os.environ for name in _OF_THE_USER)
