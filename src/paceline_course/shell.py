"""How does a notebook run a command, such as torchrun, so that it is seen and cannot fail unnoticed?"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path

from paceline_course.scratch import end_marked, marked_environment


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
    mark = uuid.uuid4().hex
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",  # several processes share few cores
        "PYTHONUNBUFFERED": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        **(env or {}),
        **marked_environment(mark),
    }
    words = shlex.split(command)
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except BaseException as error:
            end_marked(process, mark)  # torchrun gives each worker a session of its own
            if isinstance(error, subprocess.TimeoutExpired):
                raise CommandError(f"`{command}` was still running after {seconds:g} s and was ended.") from None
            raise
    if not quiet:
        print(output, end="" if output.endswith("\n") else "\n")
    if process.returncode:
        last = "\n".join(output.splitlines()[-15:])
        raise CommandError(f"`{command}` ended with exit code {process.returncode}:\n{last}")
    return output
