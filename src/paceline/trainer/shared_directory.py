"""Do all processes of a run mean the same directory?"""

from __future__ import annotations

import platform
import secrets
import time
from pathlib import Path

from paceline.distributed.collectives import Collectives
from paceline.errors import LaunchError


def check_visible(root: Path, collectives: Collectives, *, patience_seconds: float) -> None:
    """See to it that all processes mean the same directory: the first one writes what all of them read.

    A network's file system may take its time to show what another host has made.

    Raises:
        LaunchError: On every process, naming the first that does not see it.
    """
    if collectives.world.world_size == 1:
        return
    mark = root / ".lock"
    written = collectives.on_first(lambda: _word_of(mark))
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


def _word_of(mark: Path) -> str:
    """The word in a run directory that no other directory has."""
    if not (word := mark.read_text()):
        mark.write_text(word := secrets.token_hex(8))
    return word


def _read_or_nothing(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
