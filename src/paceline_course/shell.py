"""Run commands such as torchrun from a notebook: show their output, and raise an error if they fail."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from paceline.host.processes import ProcessGroup


class CommandError(Exception):
    """A command failed or timed out; after a failure the message contains its last lines."""


def run(command: str, *, seconds: float = 120, env: Mapping[str, str] | None = None, quiet: bool = False) -> str:
    """Run a command in the current directory, with one thread per process; print its output and return it.

    ``python``, ``torchrun`` and ``paceline`` are those of this interpreter's environment.

    Args:
        command: The command line, such as ``torchrun --standalone --nproc-per-node=2 hello.py``. No pipes.
        seconds: Timeout, after which the command and all its processes are ended.
        env: Additional environment variables.
        quiet: Whether to print nothing, and to return standard output alone.

    Returns:
        Standard output and standard error, interleaved; if quiet, standard output.

    Raises:
        CommandError: If the exit code is not 0, or the command times out.
    """
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",  # several processes share a few cores
        "PYTHONUNBUFFERED": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        **(env or {}),
    }
    with tempfile.TemporaryDirectory() as folder:
        log, messages = (Path(folder) / name for name in ("output", "messages"))
        messages.touch()
        with ProcessGroup() as group:
            errors = messages if quiet else subprocess.STDOUT
            child = group.start(shlex.split(command), env=variables, stdout=log, stderr=errors)
            ending = group.wait(seconds)
        output, said = (each.read_text(encoding="utf-8", errors="replace") for each in (log, messages))
    if ending.reason:
        raise CommandError(f"`{command}` was still running after {seconds:g} s and was ended.")
    if not quiet:
        print(output, end="" if output.endswith("\n") else "\n")
    if child.code:
        last = "\n".join((output + said).splitlines()[-15:])
        raise CommandError(f"`{command}` ended with exit code {child.code}:\n{last}")
    return output
