"""The identity of a run, and whether it ever had a whole checkpoint: ``run.json``."""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass

from paceline.errors import RunDirectoryError
from paceline.records.reader import read_events, read_json
from paceline.records.run_directory import RunDirectory, write_json


@dataclass(frozen=True)
class Identity:
    """What ``run.json`` holds.

    Attributes:
        id: Random; also in the manifest of each of the run's checkpoints.
        has_checkpoint: Whether a checkpoint was ever whole. From then on the run never begins again by itself.
    """

    id: str
    has_checkpoint: bool = False

    @classmethod
    def new(cls) -> Identity:
        """Return the identity of a run that begins."""
        return cls(secrets.token_hex(16))


def read_identity(directory: RunDirectory) -> Identity | None:
    """Return a run's identity; None where ``run.json`` is missing, as in runs of earlier versions, or damaged.

    Raises:
        RunDirectoryError: If it cannot be read.
    """
    try:
        document = read_json(directory.identity)
    except RunDirectoryError as error:
        absent = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
        if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, absent):
            raise
        return None
    found, has_checkpoint = document.get("id"), document.get("has_checkpoint")
    return Identity(found, has_checkpoint) if isinstance(found, str) and isinstance(has_checkpoint, bool) else None


def write_identity(directory: RunDirectory, identity: Identity) -> None:
    """Write ``run.json`` durably, unless it says the same already.

    Raises:
        RunDirectoryError: If the disk refuses.
    """
    if read_identity(directory) != identity:
        write_json(directory.identity, asdict(identity))


def had_checkpoint(directory: RunDirectory) -> bool:
    """Whether a checkpoint of the run was ever whole.

    Without ``run.json`` the events tell. An event of a single checkpoint does not count: it is written before the
    checkpoint is.

    Raises:
        RunDirectoryError: If the events have to be read and are damaged.
    """
    identity = read_identity(directory)
    if identity is not None:
        return identity.has_checkpoint
    if not directory.events.exists():
        return False
    events = list(read_events(directory.events, kinds={"checkpoint", "resume", "finish"}))
    # Each save waits for the one before, and a run that does not fail ends after its last one.
    return sum(event["event"] == "checkpoint" for event in events) > 1 or any(
        event["event"] == "resume" or event.get("status") in ("completed", "stopped") for event in events
    )
