"""Where do records go beside ``events.jsonl``, for people who watch runs elsewhere?

A tracker is fed the same events as the file and is never read back: the file is the truth. Libraries are
imported when the first record is written, so that a run pays for no tracker before its first step.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paceline.errors import RecipeError, did_you_mean

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

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

    Args:
        directory: The folder TensorBoard is pointed at.
        start_step: The step the run goes on from. What an earlier process wrote for later steps is purged.
    """

    def __init__(self, directory: Path, *, start_step: int = 0) -> None:
        self._directory = directory
        self._start_step = start_step
        self._writer: SummaryWriter | None = None

    def write(self, event: Mapping[str, Any]) -> None:
        """Take one event."""
        match event["event"]:
            case "step":
                prefix = "train"
            case "evaluation":
                prefix = f"evaluation/{event['weights']}"
            case _:
                return
        if self._writer is None:
            self._writer = self._open()
        for name, value in event.items():
            if name not in _NOT_SCALARS and isinstance(value, int | float):
                self._writer.add_scalar(f"{prefix}/{name}", value, event["step"], walltime=event.get("time"))
        # Records are rare, and one still queued when the process is killed would be a gap after a resume.
        self._writer.flush()

    def close(self) -> None:
        """Close the file, if one was opened."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        purge_step = self._start_step + 1 if self._start_step else 0
        return SummaryWriter(str(self._directory), purge_step=purge_step)


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
