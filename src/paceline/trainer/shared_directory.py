"""Do all processes of a run mean the same directory?"""

from __future__ import annotations

import platform
import secrets
import time
from pathlib import Path

from paceline.distributed.collectives import Collectives
from paceline.errors import LaunchError
from paceline.records.run_directory import cannot


def check_visible(root: Path, collectives: Collectives, *, patience_seconds: float) -> None:
    """See to it that all processes mean the same directory: the first one writes what all of them read.

    A network's file system may take its time to show what another host has made.

    Raises:
        LaunchError: On every process, naming the first that does not see it.
        RunDirectoryError: On every process, if the first cannot write there.
    """
    if collectives.world.world_size == 1:
        return
    mark = root / ".lock"
    written = collectives.on_first(lambda: _write_word(mark))
    deadline = time.monotonic() + patience_seconds
    while not (sees := _read_or_nothing(mark) == written) and time.monotonic() < deadline:
        time.sleep(0.1)
    everyone = collectives.gather((sees, platform.node()))
    blind = [rank for rank, (sees, _) in enumerate(everyone) if not sees]
    if blind:
        raise LaunchError(
            f"rank 0 on {everyone[0][1]} writes to '{root}', but rank {blind[0]} on {everyone[blind[0]][1]} sees "
            "another directory or none there; name a --run-dir on a file system that all hosts share."
        )


def _write_word(mark: Path) -> str:
    """Write a word that is new at every launch: an older one may have been copied along with the directory."""
    word = secrets.token_hex(8)
    try:
        mark.write_text(word)
    except OSError as error:
        raise cannot("write", mark, error) from error
    return word


def _read_or_nothing(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
