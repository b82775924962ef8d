"""How does a tracker do its work without the training loop waiting for it? In a thread of its own, in order."""

from __future__ import annotations

from collections.abc import Mapping
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

from paceline.telemetry.hand_over import TrackerLostError


class _Worker(Protocol):
    def write(self, event: Mapping[str, Any]) -> None: ...

    def close(self, seconds: float) -> None: ...


class Behind:
    """A tracker that works in a thread; its first error is raised by the next call.

    Args:
        tracker: Does the work.
    """

    def __init__(self, tracker: _Worker) -> None:
        self._tracker = tracker
        self._events: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._error: Exception | None = None
        self._is_closed = False

    def write(self, event: Mapping[str, Any]) -> None:
        """Take one event; raises what went wrong with an earlier one."""
        self._raise()
        if self._thread is None:
            # A daemon: a disk that hangs is not to hold the process for ever.
            self._thread = Thread(target=self._work, name="tracker", daemon=True)
            self._thread.start()
        self._events.put(event)

    def close(self, seconds: float) -> None:
        """Wait for everything that was taken, and no longer than that."""
        if self._thread is not None and not self._is_closed:
            self._is_closed = True
            self._events.put(None)
            self._thread.join(seconds)
            if self._thread.is_alive():
                raise TrackerLostError(f"did not take all records within {seconds:g} seconds")
        self._raise()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self) -> None:
        try:
            while (event := self._events.get()) is not None:
                self._tracker.write(event)
        except Exception as error:  # noqa: BLE001 (whoever writes next says it)
            self._error = error
        try:
            self._tracker.close(0)
        except Exception as error:  # noqa: BLE001 (as above)
            self._error = self._error or error
