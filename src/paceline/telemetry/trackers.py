"""Where do records go beside ``events.jsonl``, for people who watch runs elsewhere?

A tracker is fed the same events as the file and is never read back: the file is the truth. Libraries are
imported when the first record is written, so that a run pays for no tracker before its first step.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import RecipeError, did_you_mean

_NOT_SCALARS = frozenset({"event", "step", "position", "time", "epoch", "samples", "split", "weights"})


class Tracker(Protocol):
    """Takes events, as the dictionaries written to ``events.jsonl``."""

    def write(self, event: Mapping[str, Any]) -> None:
        """Take one event; kinds that mean nothing to the tracker are ignored."""
        ...

    def close(self) -> None:
        """Hand over everything that is still buffered; closing twice is harmless."""
        ...


class TensorBoardTracker:
    """Writes step records as ``train/<name>`` and evaluations as ``evaluation/<weights>/<name>``.

    One message per record through TensorBoard's own record format, in this thread: torch's ``SummaryWriter`` makes one
    per value, hands them to a thread and waits for it, which costs several times as much.

    Args:
        directory: The folder TensorBoard is pointed at.
        start_step: The step the run goes on from. What an earlier process wrote for later steps is purged.
    """

    def __init__(self, directory: Path, *, start_step: int = 0) -> None:
        self._directory = directory
        self._start_step = start_step
        self._writer: Any = None

    def write(self, event: Mapping[str, Any]) -> None:
        """Take one event."""
        match event["event"]:
            case "step":
                prefix = "train"
            case "evaluation":
                prefix = f"evaluation/{event['weights']}"
            case _:
                return
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._writer is None:
            self._writer = self._open()
        values = [
            Summary.Value(tag=f"{prefix}/{name}", simple_value=value)
            for name, value in event.items()
            if name not in _NOT_SCALARS and isinstance(value, int | float)
        ]
        self._append(step=event["step"], wall_time=event.get("time"), summary=Summary(value=values))

    def close(self) -> None:
        """Close the file, if one was opened."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> Any:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._directory.mkdir(parents=True, exist_ok=True)
        # The name that TensorBoard looks for; files of one second are told apart by process and number.
        number = sum(1 for _ in self._directory.iterdir())
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{number}"
        self._writer = RecordWriter((self._directory / name).open("ab"))
        self._append(file_version="brain.Event:2")
        purge_step = self._start_step + 1 if self._start_step else 0
        self._append(step=purge_step, session_log=SessionLog(status=SessionLog.START))
        return self._writer

    def _append(self, *, wall_time: float | None = None, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        message = Event(wall_time=time.time() if wall_time is None else wall_time, **content)
        self._writer.write(message.SerializeToString())
        # Records are rare, and one still buffered when the process is killed would be a gap after a resume.
        self._writer.flush()


TRACKERS: dict[str, Callable[..., Tracker]] = {"tensorboard": TensorBoardTracker}


def check_trackers(names: Iterable[str]) -> None:
    """Find out before a run begins whether its trackers can be had.

    Raises:
        RecipeError: If a name is unknown, or its library is not installed.
    """
    for name in names:
        if name not in TRACKERS:
            raise RecipeError(
                f"Found {name!r} in telemetry.trackers; available are: {', '.join(sorted(TRACKERS))}."
                + did_you_mean(name, TRACKERS)
            )
        if importlib.util.find_spec(name) is None:
            raise RecipeError(
                f"telemetry.trackers asks for {name!r}, which is not installed: run 'pip install {name}', or "
                "take it out with telemetry.trackers=[]."
            )


def build_trackers(names: Iterable[str], directory: Path, *, start_step: int = 0) -> list[Tracker]:
    """Build trackers by name; each gets a folder of its name in the run directory.

    Raises:
        RecipeError: If a name is unknown, or its library is not installed.
    """
    wanted = list(names)
    check_trackers(wanted)
    return [TRACKERS[name](directory / name, start_step=start_step) for name in wanted]
