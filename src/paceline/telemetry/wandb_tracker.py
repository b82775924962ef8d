"""Weights & Biases: records as history, the recipe and the environment as configuration.

Offline unless ``WANDB_MODE`` says otherwise: files in the run directory's folder ``wandb``, which ``wandb sync`` sends
to a server.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.telemetry.scalars import flat, read_note, save_note, scalars

_LONGEST_TAG = 64
_ORDER = {"step": 0, "model": 1, "ema": 2}
_FINISH_SECONDS = 20.0


class WandbTracker:
    """A run in Weights & Biases; continues the one that the directory names.

    Its steps cannot go back. A resumed run repeats the steps since its checkpoint with the same numbers; those that
    were logged are skipped.

    Args:
        directory: Its folder in the run directory.
        name: The run's.
        recipe: What was asked, nested.
        environment: As in ``environment.json``.
    """

    def __init__(self, directory: Path, name: str, recipe: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
        import wandb

        directory.mkdir(exist_ok=True)
        self._directory = directory
        note = read_note(directory) or {"id": secrets.token_hex(4), "last": [-1, 0]}
        self._id, self._last = str(note["id"]), tuple(note["last"])
        versions = environment.get("versions", {})
        tags = [f"{each} {versions[each]}" for each in ("paceline", "torch") if each in versions]
        tags += [f"{key} {environment[key]}" for key in ("device", "world_size", "host") if key in environment]
        mode: Any = os.environ.get("WANDB_MODE", "offline")  # it refuses unknown ones itself
        self._run = wandb.init(
            # It makes its folder `wandb` there.
            dir=str(directory.parent),
            id=self._id,
            resume="allow",
            # A run of the user's own program stays its own.
            reinit="create_new",
            mode=mode,
            project=os.environ.get("WANDB_PROJECT", "paceline"),
            name=name,
            config={**flat(recipe), "environment": environment},
            tags=[tag[:_LONGEST_TAG] for tag in tags],
            # Its exit handler keeps to the same limit; what has not been sent by then stays in its files.
            settings=wandb.Settings(
                console="off", silent=True, disable_code=True, disable_git=True, finish_timeout=_FINISH_SECONDS
            ),
        )
        self._note()

    def write(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Log the events' numbers, except those that are there already."""
        for event in events:
            found = scalars(event)
            if not found:
                continue
            place = (int(event["step"]), _ORDER[event.get("weights", "step")])
            if place <= self._last:
                continue
            self._run.log(found, step=place[0])
            if place[0] > self._last[0]:
                # The row of a step is complete when that of a later step begins; and what its service has received,
                # which an answer of it shows, is written even if this process is killed.
                self._run.status()
                self._note()
            self._last = place

    def close(self, status: str) -> None:
        """Set how the run ended; as failed if unknown."""
        self._run.summary["status"] = status or "killed"
        self._run.finish(exit_code=0 if status in ("completed", "stopped") else 1)
        self._note()

    def _note(self) -> None:
        save_note(self._directory, {"id": self._id, "last": list(self._last)})
