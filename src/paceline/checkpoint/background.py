"""Write a checkpoint in the background while training goes on."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Generic, TypeVar

T = TypeVar("T")


_NICENESS = 5  # threads that compute have 0: the writer gets about a quarter of a core that both want


class BackgroundWriter(Generic[T]):
    """Runs one save at a time beside training; what fails is raised by the next call, never forgotten.

    A save under way when the interpreter ends is finished first.

    Attributes:
        given_up: Set it when a save should stop waiting for other processes.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=_give_way)
        self._under_way: Future[T] | None = None
        self.given_up = threading.Event()

    def submit(self, save: Callable[[], T]) -> None:
        """Begin a save; the one before must have been waited for.

        Raises:
            RuntimeError: If it was not: two saves would write from the same copy of the state.
        """
        if self._under_way is not None:
            raise RuntimeError("a save is still under way")
        self._under_way = self._thread.submit(save)

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way; never waits."""
        return self._under_way is not None and not self._under_way.done()

    @property
    def has_failed(self) -> bool:
        """Whether the save under way is over and has failed; never waits."""
        return self._under_way is not None and self._under_way.done() and self._under_way.exception() is not None

    def is_over(self, *, within_seconds: float) -> bool:
        """Wait at most so long for the save under way; return whether it is over. Its error is kept for later."""
        return self._under_way is None or bool(wait_for([self._under_way], within_seconds).done)

    def raise_if_failed(self) -> None:
        """Raise the error of a failed save; never waits, and keeps the error."""
        if self.has_failed and self._under_way is not None:
            self._under_way.result()

    @property
    def under_way(self) -> Future[T] | None:
        """The save that nobody has waited for yet, if there is one."""
        return self._under_way

    def wait(self) -> T | None:
        """Wait for the save under way and return its result, once; None if there is none.

        Raises:
            Exception: What the save raised.
        """
        under_way, self._under_way = self._under_way, None
        return None if under_way is None else under_way.result()

    def close(self) -> None:
        """End the thread; waits for a save under way, and raises what it raised."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()


def _give_way() -> None:
    """Lower the priority of this thread, and of those that it starts; only Linux has a niceness of threads.

    Where all cores compute, each operation of a step waits for the slowest thread, and so the whole step would wait for
    the writer. Whatever waits for the writer leaves the cores to it.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, thread, max(os.getpriority(os.PRIO_PROCESS, thread), _NICENESS))
