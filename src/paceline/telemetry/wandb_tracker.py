"""Weights & Biases: records as history, the recipe and the environment as configuration.

Offline unless ``WANDB_MODE`` says otherwise: files in the run directory's folder ``wandb``, which ``wandb sync`` sends
to a server.
"""

from __future__ import annotations

import importlib
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.telemetry.async_tracker import flatten, read_tracker_state, save_tracker_state, scalars

_MAX_TAG_LENGTH = 64
_ORDER = {"step": 0, "model": 1, "ema": 2}
_FINISH_SECONDS = 20.0
_BLOCK = 32_768


class WandbTracker:
    """A run in Weights & Biases; continues the one that the directory names.

    Its steps cannot decrease. A resumed run repeats the steps since its checkpoint with the same values; those already
    logged are skipped.

    Args:
        directory: The tracker's folder in the run directory.
        name: The run's name.
        recipe: The recipe, nested.
        environment: As in ``environment.json``.
    """

    def __init__(self, directory: Path, name: str, recipe: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
        import wandb

        directory.mkdir(exist_ok=True)
        self._directory = directory
        note = read_tracker_state(directory) or {"id": secrets.token_hex(4), "last": [-1, 0]}
        self._id = str(note["id"])
        # A kill loses data that the library's service had not written yet; the files show what it had.
        last_step = _last_logged_step(directory, self._id)
        self._last = tuple(note["last"]) if last_step is None else (last_step, max(_ORDER.values()))
        versions = environment.get("versions", {})
        tags = [f"{each} {versions[each]}" for each in ("paceline", "torch") if each in versions]
        tags += [f"{key} {environment[key]}" for key in ("device", "world_size", "host") if key in environment]
        mode: Any = os.environ.get("WANDB_MODE", "offline")  # it refuses unknown ones itself
        self._run = wandb.init(
            # It creates its folder `wandb` there.
            dir=str(directory.parent),
            id=self._id,
            resume="allow",
            # Do not reuse a run of the user's own program.
            reinit="create_new",
            mode=mode,
            project=os.environ.get("WANDB_PROJECT", "paceline"),
            name=name,
            config={**flatten(recipe), "environment": environment},
            tags=[tag[:_MAX_TAG_LENGTH] for tag in tags],
            # Its exit handler uses the same limit; unsent data stays in its files.
            settings=wandb.Settings(
                console="off", silent=True, disable_code=True, disable_git=True, finish_timeout=_FINISH_SECONDS
            ),
        )
        self._save_state()

    def write(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Log the values of events, except those already logged."""
        for event in events:
            values = scalars(event)
            if not values:
                continue
            position = (int(event["step"]), _ORDER[event.get("weights", "step")])
            if position <= self._last:
                continue
            self._run.log(values, step=position[0])
            self._last = position

    def close(self, status: str) -> None:
        """Set how the run ended; failed if unknown."""
        self._run.summary["status"] = status or "killed"
        self._run.finish(exit_code=0 if status in ("completed", "stopped") else 1)
        self._save_state()

    def _save_state(self) -> None:
        save_tracker_state(self._directory, {"id": self._id, "last": list(self._last)})


def _last_logged_step(directory: Path, run_id: str) -> int | None:
    """Return the last step in the files of earlier launches; None if there are no rows."""
    files = list(directory.glob(f"*run-*-{run_id}/run-{run_id}.wandb"))
    if not files:
        return None
    protocol: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    decode_error: Any = importlib.import_module("google.protobuf.message").DecodeError
    steps: list[int] = []
    for file in files:
        for content in _records(file.read_bytes()):
            record = protocol.Record()
            try:
                record.ParseFromString(content)
            except decode_error:
                continue
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                steps += [int(each.value_json) for each in items if "_step" in (each.key, *each.nested_key)]
    return max(steps, default=None)


def _records(content: bytes) -> Iterator[bytes]:
    """Yield the complete records of a file in LevelDB's log format, without a partial last one."""
    offset, record = 7, b""  # after the file's own header
    while offset + 7 <= len(content):
        if _BLOCK - offset % _BLOCK < 7:
            offset += _BLOCK - offset % _BLOCK
            continue
        length, kind = int.from_bytes(content[offset + 4 : offset + 6], "little"), content[offset + 6]
        record += content[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # a record's only part, or its last
            if offset <= len(content):
                yield record
            record = b""
