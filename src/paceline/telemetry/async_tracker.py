"""A tracker in its own thread, behind a bounded queue: it can neither delay nor fail the run.

Trackers have in common an event's values by name, a recipe as flat keys, and what they have logged.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from paceline.records.events import parse_line
from paceline.records.reader import read_json
from paceline.records.run_directory import encode_json

# Writing a hundred records to a database takes as long as writing two.
_BATCH = 100
_LAST_SECONDS = 10.0
_abandoned: set[str] = set()


class Tracker(Protocol):
    """Receives events, as the dictionaries written to ``events.jsonl``. Used by one thread only."""

    def write(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Take events in order; skip unsupported kinds, and events logged by an earlier launch."""
        ...

    def close(self, status: str) -> None:
        """Write what is buffered; ``status`` is ``completed``, ``stopped``, ``failed``, or empty if unknown."""
        ...


class AsyncTracker:
    """Runs a tracker in a daemon thread, started with the first event.

    After the first error the tracker receives no more events, and keeps those it has.

    Args:
        name: As in the recipe.
        make: Builds the tracker; called in the thread, so that a slow import costs the run nothing.
        history: The run's ``events.jsonl``. The tracker receives its current events first, so that it also gets events
            that a killed launch had not delivered.
        capacity: Maximum number of queued events; additional ones are skipped and counted.
    """

    def __init__(
        self, name: str, make: Callable[[], Tracker], *, history: Path | None = None, capacity: int = 1000
    ) -> None:
        self.name = name
        self._make = make
        self._history = history
        self._history_bytes = history.stat().st_size if history is not None and history.is_file() else 0
        self._capacity = capacity
        self._queue: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error = ""
        self._is_done = self._is_closed = False
        self._accepted = self._delivered = self._skipped = 0

    def write(self, event: Mapping[str, Any]) -> str:
        """Queue one event; returns a problem to report, if any."""
        if self._is_done:
            return ""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"tracker {self.name}", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # the system's limit on threads
                self._thread, self._error = None, str(error)
        if self._error:
            self._is_done = True
            return f"{self.name} failed: {self._error}; it receives no more records, and the run continues."
        # The end of a run is always queued: without it the run would look killed.
        if self._queue.qsize() >= self._capacity and event["event"] != "finish":
            self._skipped += 1
            if self._skipped > 1:
                return ""
            return f"{self.name} cannot keep up: {self._capacity} records are waiting, and further ones are skipped."
        self._accepted += 1
        self._queue.put(event)
        return ""

    def close(self, seconds: float) -> str:
        """Wait up to a timeout for the queued events, then abandon the thread; returns a problem to report.

        Closing twice is harmless, and waits once.
        """
        if self._thread is None or self._is_closed:
            return ""
        self._is_closed = True
        self._queue.put(None)
        # After an error only its files remain to be closed.
        self._thread.join(max(0.0, min(seconds, 1.0) if self._error else seconds))
        was_done, self._is_done = self._is_done, True
        if self._thread.is_alive():
            _abandoned.add(self.name)
        if was_done:
            return ""
        if self._error:
            return f"{self.name} failed: {self._error}."
        if missing := self._accepted - self._delivered + self._skipped:
            total = self._accepted + self._skipped
            return f"{self.name} did not take {missing} of {total} records in time; events.jsonl has them all."
        return f"{self.name} took all records, but did not close in time." if self._thread.is_alive() else ""

    def _work(self) -> None:
        tracker: Tracker | None = None
        status = ""
        try:
            tracker = self._make()
            history = self._history_events()
            while (batch := list(islice(history, _BATCH))) and not self._is_done:
                tracker.write(batch)
            while not self._is_done:
                events, is_last = self._next_events()
                if events:
                    tracker.write(events)
                self._delivered += len(events)
                status = next((str(each["status"]) for each in events if each["event"] == "finish"), status)
                if is_last:
                    break
            if not self._is_done:
                closing, tracker = tracker, None
                closing.close(status)
        except BaseException as error:  # noqa: BLE001  # other people's libraries; some even exit
            # The message is written to the run directory; an address in it may contain a name and a password.
            self._error = re.sub(r"//[^/@\s]+@", "//***@", f"{type(error).__name__}: {error}")
            if tracker is not None:
                with contextlib.suppress(BaseException):
                    tracker.close("failed")

    def _next_events(self) -> tuple[list[Mapping[str, Any]], bool]:
        """Wait for events; return those available, and whether they are the last."""
        events: list[Mapping[str, Any]] = []
        while not events or (len(events) < _BATCH and not self._queue.empty()):
            event = self._queue.get()
            if event is not None:
                events.append(event)
            # At the end of the run, do not wait for `close`, which waits for another tracker first.
            if event is None or event["event"] == "finish":
                return events, True
        return events, False

    def _history_events(self) -> Iterator[dict[str, Any]]:
        """Yield events that were in the file when the run resumed, one at a time: a long run has millions."""
        remaining, number = self._history_bytes, 0
        if self._history is None or not remaining:
            return
        with self._history.open("rb") as file:
            while line := file.readline(remaining):
                remaining, number = remaining - len(line), number + 1
                event = parse_line(line, self._history, number, is_last=remaining == 0)
                if event is not None:
                    yield event


def limit_exit(code: int) -> None:
    """End this process with ``code`` within 10 seconds, if a tracker was abandoned.

    Otherwise an exit handler of its library may wait for a server indefinitely.
    """
    if _abandoned:
        timer = threading.Timer(_LAST_SECONDS, os._exit, [code])
        timer.daemon = True
        timer.start()


_NOT_SCALARS = frozenset({"event", "step", "position", "time", "epoch", "samples", "split", "weights"})


def scalars(event: Mapping[str, Any]) -> dict[str, float]:
    """Return a step's values as ``train/<name>``, an evaluation's as ``evaluation/<weights>/<name>``, else nothing."""
    match event["event"]:
        case "step":
            prefix = "train"
        case "evaluation":
            prefix = f"evaluation/{event['weights']}"
        case _:
            return {}
    return {
        f"{prefix}/{name}": value
        for name, value in event.items()
        if name not in _NOT_SCALARS and isinstance(value, int | float)
    }


def flatten(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return a nested mapping with dotted keys; lists and empty mappings are unchanged."""
    flattened: dict[str, Any] = {}
    for key, value in tree.items():
        flattened |= (
            flatten(value, f"{path}{key}.") if isinstance(value, Mapping) and value else {f"{path}{key}": value}
        )
    return flattened


def save_tracker_state(directory: Path, content: Mapping[str, Any]) -> None:
    """Write ``paceline.json``, the state of what a tracker has logged; atomic, but without waiting for the disk."""
    new = directory / ".paceline.json.new"
    new.write_text(encode_json(content), encoding="utf-8")
    new.replace(directory / "paceline.json")


def read_tracker_state(directory: Path) -> dict[str, Any]:
    """Return the content of ``paceline.json``; empty before it is first written."""
    path = directory / "paceline.json"
    return read_json(path) if path.is_file() else {}
