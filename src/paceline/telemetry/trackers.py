"""Where do records go beside ``events.jsonl``, for people who watch runs elsewhere?

A tracker is fed the same events as the file and is never read back: the file is the truth. Libraries are
imported when the first record is written, so that a run pays for no tracker before its first step. Whatever a tracker
does, the run goes on (:class:`Guarded`); those that talk to a service have a process of their own (``hand_over.py``).
"""

from __future__ import annotations

import importlib.util
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import RecipeError, did_you_mean
from paceline.records.run_directory import RunDirectory
from paceline.telemetry.behind import Behind
from paceline.telemetry.csv_tracker import CsvTracker
from paceline.telemetry.hand_over import HandOver, TrackerBehindError, TrackerLostError
from paceline.telemetry.scalars import scalars


class Tracker(Protocol):
    """Takes events, as the dictionaries written to ``events.jsonl``."""

    def write(self, event: Mapping[str, Any]) -> None:
        """Take one event; kinds that mean nothing to the tracker are ignored."""
        ...

    def close(self, seconds: float) -> None:
        """Hand over everything that is still buffered, and take no longer than that; closing twice is harmless."""
        ...


class Guarded:
    """A tracker that can neither hold nor fail a run.

    Its first error is its last: it gets no more records, and what it has of them is left as it is.

    Attributes:
        name: As the recipe calls it.
    """

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name = name
        self._tracker = tracker
        self._is_lost = False

    def write(self, event: Mapping[str, Any]) -> str:
        """Hand over one event; returns what there is to tell of it, mostly nothing."""
        if self._is_lost:
            return ""
        return self._say(lambda: self._tracker.write(event), "; it gets no more records, and the run goes on.")

    def close(self, seconds: float = 10.0) -> str:
        """Close it, also if it failed before; returns what there is to tell."""
        said = self._say(lambda: self._tracker.close(seconds), ".")
        self._is_lost = True
        return said

    def _say(self, action: Callable[[], None], end: str) -> str:
        try:
            action()
        except TrackerBehindError as behind:
            return f"{self.name} {behind}."
        except Exception as error:  # noqa: BLE001  # other people's libraries; nothing of theirs may end a run
            was_lost, self._is_lost = self._is_lost, True
            told = str(error) if isinstance(error, TrackerLostError) else f"failed: {type(error).__name__}: {error}"
            return "" if was_lost else f"{self.name} {told}{end}"
        return ""


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
        if not (found := scalars(event)):
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._writer is None:
            self._writer = self._open()
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in found.items()]
        self._append(step=event["step"], wall_time=event.get("time"), summary=Summary(value=values))

    def close(self, seconds: float = 0.0) -> None:
        """Close the file, if one was opened; that takes no time worth limiting."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> Any:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._directory.mkdir(exist_ok=True)
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


@dataclass(frozen=True, kw_only=True)
class TrackerFacts:
    """What trackers are told of a run beside its events.

    Attributes:
        name: The run's.
        recipe: What was asked, nested.
        environment: As in ``environment.json``.
    """

    name: str = ""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)


TRACKERS = ("tensorboard", "mlflow", "wandb", "csv")


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
        if importlib.util.find_spec(name) is None:  # a module of Python's own has the name of `csv`
            package = "tensorboard" if name == "tensorboard" else f"'paceline[{name}]'"
            raise RecipeError(
                f"telemetry.trackers asks for {name!r}, which is not installed: run pip install {package}, or "
                "take it out of telemetry.trackers."
            )


def build_trackers(
    names: Iterable[str], directory: Path, *, start_step: int = 0, facts: TrackerFacts | None = None
) -> list[Guarded]:
    """Build trackers by name; each gets a folder of its name in the run directory.

    Raises:
        RecipeError: If a name is unknown, or its library is not installed.
    """
    wanted = list(names)
    check_trackers(wanted)
    told = asdict(facts or TrackerFacts())

    def built(name: str) -> Tracker:
        match name:
            case "tensorboard":
                return TensorBoardTracker(directory / name, start_step=start_step)
            case "csv":
                return Behind(CsvTracker(directory / name, RunDirectory(directory).events))
        return HandOver(name, directory / name, told)

    return [Guarded(name, built(name)) for name in wanted]
