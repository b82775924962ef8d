"""Import libraries without running Python's garbage collector.

``import torch`` creates hundreds of thousands of live objects, which the collector would search repeatedly; see
``docs/decisions/0069-start-up-and-memory.md``.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

# From so many new objects on it pays to spare the next search; a library makes far more.
_MANY = 10_000
# The process in which a block is open, while it is.
_open_in: set[int] = set()


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """No search for garbage within, where large libraries are imported; it may be nested.

    A process that is forked within, such as a loader of data, is searched as ever.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    _open_in.add(os.getpid())
    try:
        yield
    finally:
        _open_in.clear()
        if gc.get_count()[0] > _MANY and not gc.get_freeze_count():
            # Out of the youngest generation, in which the next search would begin with all that was loaded, into the
            # oldest; not left frozen, since what the caller had made before may be garbage one day.
            gc.freeze()
            gc.unfreeze()
        gc.enable()


def _search_in_child() -> None:
    """A forked process never leaves the block it was forked in."""
    if _open_in:
        _open_in.clear()
        # A search writes to what it goes through: frozen, the parent's pages stay shared.
        gc.freeze()
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_search_in_child)
