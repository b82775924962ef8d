"""Import libraries without running Python's garbage collector, and torchvision without torch's compiler.

``import torch`` creates hundreds of thousands of live objects, which the collector would search repeatedly; see
``docs/decisions/0069-start-up-and-memory.md``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

# From this many new objects on, it pays to skip the next collection; a library creates far more.
_MANY = 10_000
# Id of the process in which a block is active.
_open_in: set[int] = set()
_COMPILER = "torch._dynamo.utils"
_removing = threading.Lock()


class _CompilerLater(ModuleType):
    """Placeholder for a module of torch's compiler, which is loaded when it is used."""

    def is_compile_supported(self, device_type: Any) -> Any:
        return self.__getattr__("is_compile_supported")(device_type)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system asks for these
            raise AttributeError(name)
        _remove(self)
        return getattr(importlib.import_module(_COMPILER), name)


def _remove(placeholder: ModuleType) -> None:
    with _removing:  # another thread may have loaded the compiler meanwhile
        if sys.modules.get(_COMPILER) is placeholder:
            del sys.modules[_COMPILER]


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Context in which ``import torchvision.ops`` does not load torch's compiler; it may be nested.

    torchvision imports one function of it, which only region pooling calls. The compiler takes several times as long to
    load as the rest of torchvision.
    """
    placeholder = _CompilerLater(_COMPILER)
    sys.modules.setdefault(_COMPILER, placeholder)
    try:
        yield
    finally:
        _remove(placeholder)


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Context without garbage collection, for imports of large libraries; it may be nested.

    A process forked inside, such as a loader process, collects garbage as usual.
    """
    if "IPython" in sys.modules and "tqdm.auto" not in sys.modules:
        # Without ipywidgets it warns of bars that nobody asked for, once, when a library imports it.
        with warnings.catch_warnings(action="ignore"), contextlib.suppress(ImportError):
            importlib.import_module("tqdm.auto")
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
