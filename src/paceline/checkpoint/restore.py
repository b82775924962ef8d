"""Which checkpoint does a run continue from?

One process chooses and hands the choice to the others, so that all of them load the same one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint.store import CheckpointStore, DamagedCheckpoint, step_of, verify


@dataclass(frozen=True)
class Choice:
    """The checkpoint to continue from, and the newer ones that cannot be used.

    Attributes:
        path: The checkpoint, or None to begin at step 0.
        step: Its step; 0 without one.
        damaged: Newer checkpoints that do not verify, newest first.
        incidents: What the run's events are to say of what was found, by kind.
    """

    path: Path | None
    step: int
    damaged: tuple[DamagedCheckpoint, ...] = ()
    incidents: tuple[tuple[str, str], ...] = ()

    @property
    def lost_everything(self) -> bool:
        """True if there are checkpoints and none is whole: to begin again must be the user's decision."""
        return self.path is None and bool(self.damaged)


def choose(store: CheckpointStore, *, wanted: Path | None = None, foreign: Collection[int] = ()) -> Choice:
    """Pick the checkpoint to continue from: the one asked for, or the newest whole one.

    Nothing on disk is changed: setting damaged ones aside is the writer's business.

    Args:
        store: The run's checkpoints.
        wanted: The one asked for.
        foreign: Steps whose checkpoints belong to another run.

    Raises:
        CheckpointError: If the one asked for is not whole; another is never taken in its place.
    """
    if wanted is not None:
        return Choice(Path(wanted), verify(wanted).step)
    path, damaged = store.newest_whole(without=foreign)
    step = 0 if path is None else step_of(path) or 0
    return Choice(path, step, tuple(damaged))
