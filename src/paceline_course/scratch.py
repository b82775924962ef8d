"""Run the code of a notebook apart from the user's files, and end everything that it started."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.processes import ProcessGroup, without_rank


@dataclass(frozen=True)
class Ended:
    """How a command in a scratch folder ended.

    Attributes:
        code: Its exit code, negative after a signal; None if its time was up.
        complaints: The end of its standard error.
    """

    code: int | None
    complaints: str


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder that is gone afterwards, with a folder ``work`` in it for a notebook to run in."""
    # A short name: paths of sockets in it have at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="labs-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "work").mkdir()
        (folder / "t").mkdir()
        yield folder


def run_apart(module: str, arguments: Sequence[str], folder: Path, *, seconds: float) -> Ended:
    """Run a module of this Python in a scratch folder, until it ends or the time is up, and end all it started.

    What Jupyter, IPython and programs for temporary files write goes into the folder too, nothing into the user's home.

    Args:
        module: As after ``python -m``.
        arguments: What follows.
        folder: As :func:`scratch_folder` made it.
        seconds: How long it may take.
    """
    log = folder / "complaints"
    with ProcessGroup() as group:
        child = group.start(
            [sys.executable, "-P", "-m", module, *arguments],
            cwd=folder / "work",
            env=_environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
        code = None if group.wait(seconds).reason else child.code
    return Ended(code, log.read_text(encoding="utf-8", errors="replace")[-2000:].strip())


def _environment(folder: Path) -> dict[str, str]:
    inherited = without_rank(os.environ)
    # Relative to where this process is, and the other is elsewhere.
    paths = [os.path.abspath(path) for path in inherited.get("PYTHONPATH", "").split(os.pathsep) if path]
    programs = Path(sys.executable).parent
    return {
        **inherited,
        **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {}),
        "PATH": f"{programs}{os.pathsep}{inherited.get('PATH', '')}",
        "PYTHONUNBUFFERED": "1",
        "XDG_CONFIG_HOME": str(folder / "config"),
        "TMPDIR": str(folder / "t"),
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_CONFIG_DIR": str(folder / "jupyter" / "config"),
        "JUPYTER_DATA_DIR": str(folder / "jupyter" / "data"),
        "JUPYTER_RUNTIME_DIR": str(folder / "jupyter" / "runtime"),
    }
