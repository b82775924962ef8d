"""Which checkpoint is the best so far, by which metric?"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.checkpoint import codec
from paceline.checkpoint.durable import reporting_disk_errors, write_file
from paceline.checkpoint.tensor_file import read_regular_file
from paceline.errors import CheckpointError
from paceline.plain_json import load_json
from paceline.records.run_directory import sync_directory

FILE_NAME = "best.json"
_TEMPORARY = ".saving-best-"


@dataclass(frozen=True)
class Best:
    """The step that is best so far, and the measurement that says so.

    Attributes:
        step: Names the checkpoint.
        metric: Name of the metric that decided.
        value: Its value, in the metric's own unit.
        weights: Which weights it was measured with, ``model`` or ``ema``.
    """

    step: int
    metric: str
    value: float
    weights: str = "model"


def write_best(directory: Path, best: Best) -> None:
    """Replace ``best.json`` in one move; the old content or the new is always there.

    Raises:
        CheckpointError: If the disk refuses; the old file is untouched.
    """
    text = json.dumps(codec.encode(asdict(best), where=FILE_NAME)[0], allow_nan=False).encode("ascii")
    temporary = directory / f"{_TEMPORARY}{secrets.token_hex(4)}"
    with reporting_disk_errors("write", directory / FILE_NAME):
        for leftover in directory.glob(f"{_TEMPORARY}*"):
            leftover.unlink(missing_ok=True)
        try:
            write_file(temporary, [text])
            os.rename(temporary, directory / FILE_NAME)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        sync_directory(directory)


def read_best(directory: Path) -> Best | None:
    """Return the content of ``best.json``, or None if there is none.

    Raises:
        CheckpointError: If it cannot be read or is not what :func:`write_best` writes.
    """
    path = directory / FILE_NAME
    with reporting_disk_errors("read", path):
        try:
            content = read_regular_file(path)
        except FileNotFoundError:
            return None
    try:
        best = Best(**codec.decode(load_json(content), {}))
        if type(best.step) is not int or type(best.value) not in (int, float) or type(best.metric) is not str:
            raise ValueError("its entries have other types")
    except (ValueError, TypeError, CheckpointError) as error:
        raise CheckpointError(
            f"{path} does not name a best step: {error}; delete it, and the next evaluation writes it anew."
        ) from error
    return best
