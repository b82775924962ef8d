"""How does the code of a notebook run apart from the user's files, and how is all that it started ended?"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MARKS = "PACELINE_LABS_MARKS"
_OF_A_LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_POLL_SECONDS = 0.02


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
    mark = uuid.uuid4().hex
    log = folder / "complaints"
    with log.open("wb") as complaints:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            cwd=folder / "work",
            env=_environment(folder) | marked_environment(mark),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=complaints,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_marked(process, mark)
    return Ended(code, log.read_text(encoding="utf-8", errors="replace")[-2000:].strip())


def _environment(folder: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in _OF_A_LAUNCH}
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


def end_marked(process: subprocess.Popen[Any], mark: str) -> None:
    """SIGKILL the process and all it started, whichever session they are in (where there is no /proc: its own)."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    while family := set(_marked(mark)):
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)


def marked_environment(mark: str) -> dict[str, str]:
    """The variable by which what a process starts is found again; marks of who started this one stay."""
    return {_MARKS: ",".join(filter(None, (os.environ.get(_MARKS), mark)))}


def _marked(mark: str) -> Iterator[int]:
    begin, wanted = f"{_MARKS}=".encode(), mark.encode()
    if not Path("/proc/self/environ").exists():
        return
    for entry in Path("/proc").iterdir():
        # That of a process just forked, or ended, is empty or gone; that of another user cannot be read.
        with contextlib.suppress(OSError):
            for variable in (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else ():
                if variable.startswith(begin) and wanted in variable.removeprefix(begin).split(b","):
                    yield int(entry.name)
