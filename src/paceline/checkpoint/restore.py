"""Which checkpoint does a run continue from?

One process chooses and hands the choice to the others as plain data, so that all of them load the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.durable import reporting_disk_errors
from paceline.checkpoint.store import CheckpointStore, DamagedCheckpoint, step_of, verify
from paceline.errors import CheckpointError


@dataclass(frozen=True)
class Choice:
    """The checkpoint to continue from, and the newer ones that cannot be used.

    Attributes:
        path: The checkpoint, or None to begin at step 0.
        step: Its step; 0 without one.
        damaged: Newer checkpoints that do not verify, newest first.
    """

    path: Path | None
    step: int
    damaged: tuple[DamagedCheckpoint, ...] = ()

    @property
    def lost_everything(self) -> bool:
        """True if there are checkpoints and none is whole: to begin again must be the user's decision."""
        return self.path is None and bool(self.damaged)

    def as_data(self) -> dict[str, Any]:
        """Return the choice as JSON-able data, to be sent to the other ranks."""
        return {
            "path": None if self.path is None else str(self.path),
            "step": self.step,
            "damaged": [{"path": str(one.path), "step": one.step, "reason": one.reason} for one in self.damaged],
        }

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Choice:
        """Rebuild a choice from :meth:`as_data`."""
        damaged = (DamagedCheckpoint(Path(one["path"]), one["step"], one["reason"]) for one in data["damaged"])
        path = None if data["path"] is None else Path(data["path"])
        return cls(path, data["step"], tuple(damaged))


def choose(store: CheckpointStore, *, wanted: Path | None = None) -> Choice:
    """Pick the checkpoint to continue from: the one asked for, or the newest whole one.

    Nothing on disk is changed: setting damaged ones aside is the writer's business.

    Raises:
        CheckpointError: If the one asked for is not whole; another is never taken in its place.
    """
    if wanted is not None:
        return Choice(Path(wanted), verify(wanted).step)
    path, damaged = store.newest_whole()
    step = 0 if path is None else step_of(path) or 0
    return Choice(path, step, tuple(damaged))


def locate(target: Path) -> Path:
    """Find the checkpoint meant by a run directory, a checkpoint directory or a directory of checkpoints.

    Returns:
        A checkpoint that verifies: the newest whole one where there is a choice.

    Raises:
        CheckpointError: If there is none.
    """
    target = Path(target)
    with reporting_disk_errors("look for checkpoints in", target):
        directory = target / "checkpoints" if (target / "checkpoints").is_dir() else target
    store = CheckpointStore(directory)
    if not store.steps():
        verify(target)
        return target
    choice = choose(store)
    if choice.path is None:
        raise CheckpointError(
            f"No checkpoint in {directory} is whole: {choice.damaged[0].reason} Give another run or checkpoint."
        )
    return choice.path
