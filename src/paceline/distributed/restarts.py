"""The ranks of a launch have died: how many are started again, if any?

A cluster's faults pass, a program's come again. So a failure that comes again before the run has got any further is
not met by more of the same.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import DataError, ModelError, RecipeError, RunDirectoryError

# Found by every process alike, from what the user wrote. Others may pass: a peer that is late, a directory in use.
_MISTAKES = (RecipeError, DataError, ModelError)
_TORCHRUN = ("torch.distributed.run", "torchrun")


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """What the user allows.

    Attributes:
        most: How often the ranks may be started again.
        sizes: The numbers of ranks that may be started, the largest first.
        run_dir: The directory of their run, which knows how far it got.
        arguments: What a rank is started with from then on.
    """

    most: int
    sizes: tuple[int, ...]
    run_dir: Path
    arguments: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How a launch ended that may be started again.

    Attributes:
        size: Its number of ranks.
        step: The last step that the run had a record of by then; -1 if it had none.
        cause: Why, in a few words.
    """

    size: int
    step: int
    cause: str


def next_size(sizes: Sequence[int], failures: Sequence[Failure]) -> int | None:
    """How many ranks to start after these failures of a run; None if the last one only came again.

    After a failure of the most ranks, fewer go on, since some of them may have lost their place; after a failure of
    fewer, all are tried again. Without progress in between, ever fewer are tried, and then the same fault ends it.

    Args:
        sizes: The numbers of ranks that may be started, the largest first.
        failures: What has happened so far, the latest last.
    """
    last = failures[-1]
    before = failures[-2] if len(failures) > 1 else None
    progressed = before is None or last.step > before.step
    fewer = [size for size in sizes if size < last.size]
    if fewer and (last.size == sizes[0] or not progressed):
        return fewer[0]
    if before is not None and not progressed and last.cause == before.cause:
        return None
    return sizes[0]


def last_step(run_dir: Path) -> int:
    """The last step that a run has a record of; -1 if it has none that can be read."""
    # Here, so that a launch that needs no restart loads no library of records.
    from paceline.records.reader import read_events
    from paceline.records.run_directory import RunDirectory

    path = RunDirectory(run_dir).events
    try:
        return max((event["step"] for event in read_events(path)), default=-1) if path.is_file() else -1
    except RunDirectoryError:
        return -1  # the next start says what is wrong with them


def meets_every_start(error: BaseException) -> bool:
    """Whether an error is a mistake that the next start would only find again."""
    return isinstance(error, _MISTAKES)


def end_torchrun(environ: Mapping[str, str]) -> None:
    """After a mistake at the first start: have torchrun end, if it would start this process again.

    torchrun knows no exit code for that: it would tell the mistake as often as it may start processes. What comes up
    only later may pass, and is left to it.
    """
    first = environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    # One of a host's processes asks, since a second signal would break torchrun's own clearing up.
    if first and environ.get("LOCAL_RANK") == "0" and is_torchrun(os.getppid()):
        sys.stderr.flush()
        os.kill(os.getppid(), signal.SIGTERM)


def is_torchrun(pid: int) -> bool:
    """Whether a process is torchrun."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    # `python -m torch.distributed.run …`, or the interpreter and the path of the command `torchrun`.
    return any(Path(word).name in _TORCHRUN for word in words[:6])
