"""Commands such as torchrun in a notebook: their output is shown, and a failure raises an error."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from paceline.processes import ProcessGroup


class CommandError(Exception):
    """A command failed, or took too long; the message holds its last lines."""


def run(command: str, *, seconds: float = 120, env: Mapping[str, str] | None = None, quiet: bool = False) -> str:
    """Run a command in the current directory with one thread per process, print what it writes, and return it.

    ``python``, ``torchrun`` and ``paceline`` are those of this interpreter's environment.

    Args:
        command: As one would type it: ``torchrun --standalone --nproc-per-node=2 hello.py``. No pipes.
        seconds: After so long it and all it started are ended.
        env: Environment variables besides those that are there.
        quiet: Whether only the return value holds the output.

    Returns:
        Standard output and standard error, as they came.

    Raises:
        CommandError: If the exit code is not 0, or the time is up.
    """
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",  # several processes share few cores
        "PYTHONUNBUFFERED": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        **(env or {}),
    }
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "output"
        with ProcessGroup() as group:
            child = group.start(shlex.split(command), env=variables, stdout=log, stderr=subprocess.STDOUT)
            ending = group.wait(seconds)
        output = log.read_text(encoding="utf-8", errors="replace")
    if ending.reason:
        raise CommandError(f"`{command}` was still running after {seconds:g} s and was ended.")
    if not quiet:
        print(output, end="" if output.endswith("\n") else "\n")
    if child.code:
        last = "\n".join(output.splitlines()[-15:])
        raise CommandError(f"`{command}` ended with exit code {child.code}:\n{last}")
    return output
