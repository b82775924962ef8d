"""Programs of the user that train a run: what is recorded of one, and how a study has it computed again.

A study, such as ``verify``, starts the recorded program with ``REPLAY_VARIABLE``: JSON of the run's identity,
another run directory, and recipe keys, which end the run after a step. ``paceline.train``, ``fit`` and ``Loop`` then
use these, and end the program after that step.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.distributed.environment import LaunchEnvironment
from paceline.errors import RunDirectoryError
from paceline.host.world import COMMAND_VARIABLE
from paceline.records.reader import read_identity
from paceline.records.run_directory import RunDirectory

REPLAY_VARIABLE = "PACELINE_REPLAY"
# The program's file, for the processes that it starts, which record it.
PROGRAM_VARIABLE = "PACELINE_PROGRAM"
# How many other runs the program trained before.
EARLIER_RUNS_VARIABLE = "PACELINE_EARLIER_RUNS"

_run_dirs: set[object] = set()


def requested_replay(run_dir: Path | None) -> tuple[Path, dict[str, Any]] | None:
    """Return the directory and the recipe keys to use instead of the program's; None if it is not computed again.

    Every run of a program asks, before it opens its directory, and is counted.

    Raises:
        RunDirectoryError: If the program is about to train another run than the one that is computed again.
    """
    _run_dirs.add(object() if run_dir is None else os.path.abspath(run_dir))
    if (setting := os.environ.get(REPLAY_VARIABLE)) is None:
        return None
    run, target, overrides = json.loads(setting)
    other = None if run_dir is None else read_identity(RunDirectory(run_dir))
    if other is not None and other.id != run:
        raise RunDirectoryError(f"the program trains another run first, '{run_dir}'; give each run its own program.")
    return Path(target), overrides


@contextmanager
def recorded_program(launch: LaunchEnvironment) -> Iterator[None]:
    """Record the command that started this program, also one that a launcher was given, and its file if it has one."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    found = {COMMAND_VARIABLE: shlex.join(_typed(launch)), EARLIER_RUNS_VARIABLE: str(len(_run_dirs) - 1)}
    found |= {} if file is None else {PROGRAM_VARIABLE: os.path.abspath(file)}
    set_here = [name for name in found if name not in os.environ]
    os.environ.update({name: found[name] for name in set_here})
    try:
        yield
    finally:
        for name in set_here:
            del os.environ[name]


def _typed(launch: LaunchEnvironment) -> list[str]:
    if launch.source == "torchrun" and "TORCHELASTIC_RUN_ID" in os.environ:
        command_line = Path(f"/proc/{os.getppid()}/cmdline")
        if command_line.is_file():
            return command_line.read_bytes().decode(errors="replace").split("\0")[:-1]
    return [sys.executable, *sys.orig_argv[1:]]
