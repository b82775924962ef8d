"""How do processes write one checkpoint together, without a collective?

Each writes its files into the hidden directory that the first has made, and then a note of what it wrote. The first
waits for the notes; only it writes the manifest and gives the directory its name.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.checkpoint.durable import FileFacts, size_of, write_file
from paceline.errors import CheckpointError
from paceline.plain_json import load_json

_LOOK_EVERY_SECONDS = 0.05

Files = dict[str, dict[str, FileFacts]]
"""Files with their facts, by component."""


@dataclass(frozen=True)
class Together:
    """What the processes of a save know of one another.

    Attributes:
        room: The hidden directory, which is there.
        rank: This process.
        world_size: How many write.
        patience_seconds: For so long the first process waits while no other gets on.
        given_up: Set when the run has failed elsewhere: what is waited for may never come.
    """

    room: Path
    rank: int
    world_size: int
    patience_seconds: float
    given_up: threading.Event = field(default_factory=threading.Event)


def leave_note(together: Together, files: Files, *, error: str | None = None) -> None:
    """Tell the first process what this one has written, or why it could not.

    Raises:
        OSError: If the disk refuses that too.
    """
    content = {
        "error": error,
        "files": {name: {file: vars(facts) for file, facts in entry.items()} for name, entry in files.items()},
    }
    note = _note(together, together.rank)
    unfinished = note.with_suffix(".part")
    write_file(unfinished, [json.dumps(content).encode("ascii")])
    os.rename(unfinished, note)


def gather_notes(together: Together) -> Files:
    """Wait for the others' notes and take them away: the files that all of them have written.

    Raises:
        CheckpointError: If one could not write, or does not get on.
    """
    files: Files = {}
    for rank in range(1, together.world_size):
        content = _wait_for(together, rank)
        if content["error"] is not None:
            raise CheckpointError(f"rank {rank} could not write its part of the checkpoint: {content['error']}")
        for name, entry in content["files"].items():
            files.setdefault(name, {}).update({file: FileFacts(**facts) for file, facts in entry.items()})
        _note(together, rank).unlink()
    return files


def _wait_for(together: Together, rank: int) -> Mapping[str, Any]:
    note, size, since = _note(together, rank), -1, time.monotonic()
    while not note.exists():
        if (now := size_of(together.room)) != size:
            size, since = now, time.monotonic()
        if together.given_up.wait(_LOOK_EVERY_SECONDS):
            raise CheckpointError(f"rank {rank} has not written its part of the checkpoint, and the run has failed.")
        if time.monotonic() - since > together.patience_seconds:
            raise CheckpointError(
                f"rank {rank} has not written its part of the checkpoint in {together.room}, and nothing was written "
                f"there for {together.patience_seconds:.0f} s; all hosts need to see the same run directory."
            )
    content: Mapping[str, Any] = load_json(note.read_bytes())
    return content


def _note(together: Together, rank: int) -> Path:
    return together.room / f"note-{rank:05d}.json"
