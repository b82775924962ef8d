"""Was this process asked to stop? The handler sets a flag; the loop does the rest between two steps."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

from paceline.world import STOP_SIGNALS

# A launcher and a terminal may both deliver one request; a second one counts only after this.
_SAME_REQUEST_SECONDS = 1.0


class StopRequest:
    """Listens for stop signals while it is entered; a second signal ends the process at once.

    Ending at once is safe at any moment: a checkpoint is whole or invisible.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._first_at = 0.0
        self._previous: dict[signal.Signals, object] = {}

    @property
    def requested(self) -> bool:
        """Whether a stop signal has arrived."""
        return self.signal_name is not None

    def __enter__(self) -> StopRequest:
        # Handlers belong to the main thread; elsewhere (a notebook's worker, say) the caller's stay in place.
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._remember) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # None stands for a handler that was not set from Python, and cannot be set from here.
            if handler is not None:
                signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned
        self._previous = {}

    def _remember(self, number: int, _: FrameType | None) -> None:
        if self.signal_name is None:
            self.signal_name, self._first_at = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - self._first_at > _SAME_REQUEST_SECONDS:
            os._exit(128 + number)
