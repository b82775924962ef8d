"""How does a run appear in Weights & Biases? Records as history, the recipe and the environment as configuration.

Offline unless ``WANDB_MODE`` says otherwise: files in the run directory's folder ``wandb``, which ``wandb sync`` takes
to a server.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.records.reader import read_json
from paceline.records.run_directory import encode_json
from paceline.telemetry.scalars import flat, scalars

_LONGEST_TAG = 64
_ORDER = {"step": 0, "model": 1, "ema": 2}


class WandbTool:
    """A run in Weights & Biases; goes on with the one that the directory names.

    Its steps cannot go back. A run that was killed does again the steps since its checkpoint, with the same numbers;
    those that were logged are left out.

    Args:
        directory: Its folder in the run directory.
        facts: ``name``, ``recipe`` and ``environment`` of the run.
    """

    at_once = 1

    def __init__(self, directory: Path, facts: Mapping[str, Any]) -> None:
        import wandb

        self._known = directory / "paceline.json"
        told = read_json(self._known) if self._known.is_file() else {"id": secrets.token_hex(4), "last": [-1, 0]}
        self._id, self._last = str(told["id"]), tuple(told["last"])
        mode: Any = os.environ.get("WANDB_MODE", "offline")  # it refuses another itself, and names those there are
        self._run = wandb.init(
            # It makes its folder `wandb` there.
            dir=str(directory.parent),
            id=self._id,
            resume="allow",
            mode=mode,
            project=os.environ.get("WANDB_PROJECT", "paceline"),
            name=facts["name"],
            config={**flat(facts["recipe"]), "environment": facts["environment"]},
            tags=[tag[:_LONGEST_TAG] for tag in _tags(facts["environment"])],
            # Nothing of this process is worth keeping: neither what it prints nor its code.
            settings=wandb.Settings(console="off", silent=True, disable_code=True, disable_git=True),
        )
        self._note()

    def write(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Log the events' numbers, unless they are there already."""
        for event in events:
            self._write(event)

    def _write(self, event: Mapping[str, Any]) -> None:
        found = scalars(event)
        here = (int(event["step"]), _ORDER[event.get("weights", "step")])
        if not found or here <= self._last:
            return
        self._run.log(found, step=here[0])
        self._last = here
        self._note()

    def close(self, status: str) -> None:
        """Say how the run ended; as failed if nobody knows."""
        self._run.summary["status"] = status or "killed"
        self._run.finish(exit_code=0 if status in ("completed", "stopped") else 1)

    def _note(self) -> None:
        """Note how far it is; in one move, but without waiting for the disk."""
        new = self._known.with_name(".paceline.json.new")
        new.write_text(encode_json({"id": self._id, "last": list(self._last)}), encoding="utf-8")
        new.replace(self._known)


def _tags(environment: Mapping[str, Any]) -> list[str]:
    versions = environment.get("versions", {})
    named = [f"{name} {versions[name]}" for name in ("paceline", "torch") if name in versions]
    return [*named, *(f"{key} {environment[key]}" for key in ("device", "world_size", "host") if key in environment)]
