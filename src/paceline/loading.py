"""Import libraries without running Python's garbage collector.

``import torch`` creates hundreds of thousands of live objects, which the collector would search repeatedly; see
``docs/decisions/0069-start-up-and-memory.md``.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

# From this many new objects on, it pays to skip the next collection; a library creates far more.
_MANY = 10_000
# Id of the process in which a block is active.
_open_in: set[int] = set()


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Context without garbage collection, for imports of large libraries; it may be nested.

    A process forked inside, such as a loader process, collects garbage as usual.
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
            # Move the loaded objects from the youngest generation, where the next collection would scan all of them, to
            # the oldest. They are not left frozen, since objects that the caller created before may become garbage.
            gc.freeze()
            gc.unfreeze()
        gc.enable()


def _search_in_child() -> None:
    """Reset the state: a forked process never leaves the block it was forked in."""
    if _open_in:
        _open_in.clear()
        # A collection writes to the objects it visits: freezing them keeps the parent's pages shared.
        gc.freeze()
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_search_in_child)
