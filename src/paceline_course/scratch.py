"""Run notebook code away from the user's files, and end every process it started."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.host.processes import ProcessGroup, without_rank_variables


@dataclass(frozen=True)
class ScratchResult:
    """How a process in a scratch folder ended.

    Attributes:
        code: Exit code, negative after a signal; None after a timeout.
        stderr: The last 2000 characters of standard error.
    """

    code: int | None
    stderr: str


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Create a temporary folder, with a subfolder ``work`` to run a notebook in."""
    # The name is short because socket paths in it may have at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="labs-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "work").mkdir()
        (folder / "t").mkdir()
        yield folder


def run_in_scratch(module: str, arguments: Sequence[str], folder: Path, *, seconds: float) -> ScratchResult:
    """Run a Python module in a scratch folder until it ends or times out; then end every process it started.

    Configuration of Jupyter and IPython and temporary files stay in the folder too, not in the user's home.

    Args:
        module: The module, as for ``python -m``.
        arguments: Its arguments.
        folder: A folder from :func:`scratch_folder`.
        seconds: Timeout.
    """
    log = folder / "stderr"
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
    return ScratchResult(code, log.read_text(encoding="utf-8", errors="replace")[-2000:].strip())


def _environment(folder: Path) -> dict[str, str]:
    inherited = without_rank_variables(os.environ)
    # Relative paths would be wrong in the child's working directory.
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
