"""Let a process that waits for others still stop on request.

Such a wait is inside torch, where Python's signal handlers do not run: a process whose peer never comes, or hangs,
would ignore signals until the timeout.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from paceline.distributed.local_launch import report_error
from paceline.errors import StoppedError
from paceline.world import STOP_SIGNALS, World

# The peers may be about to arrive: then the run stops in order, after its first step.
_GRACE_SECONDS = 3.0


@contextmanager
def block_stop_signals() -> Iterator[None]:
    """Block stop signals in other threads: torch prints a stack if one interrupts its wait."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


class ExitOnSignal:
    """Ends this process if it still waits some seconds after a stop signal; until :meth:`close`.

    Only for use while there is nothing to save. A signal without a Python handler ends the process anyway.
    """

    def __init__(self, world: World) -> None:
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if world.world_size == 1 or threading.current_thread() is not threading.main_thread():
            return
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        previous = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if previous != -1:  # belongs to an event loop, which needs it
            signal.set_wakeup_fd(previous)
            os.close(self._read)
            os.close(self._write)
            return
        self._thread = threading.Thread(target=self._watch, name="stop-while-waiting", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Restore the signal handlers."""
        if self._thread is None:
            return
        signal.set_wakeup_fd(-1)
        self._closed.set()
        # Closing it would not wake the reader while a child process also holds the other end.
        with suppress(BlockingIOError):
            os.write(self._write, b"\0")
        self._thread.join()
        os.close(self._write)
        os.close(self._read)
        self._thread = None

    def _watch(self) -> None:
        number = 0
        while number not in STOP_SIGNALS and not self._closed.is_set():
            number = os.read(self._read, 1)[0]
        if self._closed.wait(_GRACE_SECONDS):
            return
        name = signal.Signals(number).name
        error = StoppedError(f"stopped by {name} while waiting for the other processes; run the same command again.")
        code = report_error(error, os.environ)
        sys.stderr.flush()
        os._exit(code)
