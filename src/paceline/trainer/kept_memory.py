"""How is the memory of a step on the CPU kept for the next, and not fetched from the system anew?

The C library gives a large block back to the system as soon as it is freed, and fetches it again, page by page and all
zero, at the next step. On a GPU torch keeps its memory itself; on the CPU the library is asked to, where tuning guides
put another allocator in its place. Why, and at what price: ``docs/decisions/0069-start-up-and-memory.md``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Mapping

import torch

# Of <malloc.h>, for mallopt: when freed memory is returned; from which size on, and how many, blocks may be mapped each
# by itself.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_NEVER, _NO_BLOCKS = -1, 0
# What the library comes to by itself when large blocks are freed, and how many it maps unless told otherwise.
_USUAL = {_TRIM_THRESHOLD: 64 * 2**20, _MMAP_THRESHOLD: 32 * 2**20, _MMAP_MAX: 65_536}
# Whoever has chosen for the process itself keeps what was chosen: the library's settings, or another allocator.
_SETTINGS = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_")
_SAYING = ("LD_PRELOAD", "GLIBC_TUNABLES")
_keeping: list[torch.device] = []  # of runs within runs, all that keep it: the last to end gives it back


@contextlib.contextmanager
def memory_kept(device: torch.device, environment: Mapping[str, str] = os.environ) -> Iterator[bool]:
    """Keep freed memory in the process until the end, and give back then what is free; whether it is kept.

    It changes no number. Nothing is done on other devices, with another C library than GNU's, or where the
    environment says how memory is to be had.

    Args:
        device: Where the network is.
        environment: Variables of this process.
    """
    library = None if device.type != "cpu" or _is_chosen(environment) else _gnu_library()
    if library is None:
        yield False
        return
    library.mallopt(_MMAP_MAX, _NO_BLOCKS)
    library.mallopt(_TRIM_THRESHOLD, _NEVER)
    _keeping.append(device)
    try:
        yield True
    finally:
        _keeping.pop()
        if not _keeping:
            for parameter, value in _USUAL.items():
                library.mallopt(parameter, value)
            library.malloc_trim(0)


def _is_chosen(environment: Mapping[str, str]) -> bool:
    settings = any(environment.get(name) for name in _SETTINGS)
    return settings or any("malloc" in environment.get(name, "") for name in _SAYING)


def _gnu_library() -> ctypes.CDLL | None:
    """The C library of this process, if it is GNU's."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc"):
            return ctypes.CDLL(None)
    return None
