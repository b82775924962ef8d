"""Run a whole notebook in a separate process: ``python -m paceline_course.execution``."""

from __future__ import annotations

import json
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import LabError
from paceline_course.cells import read_notebook
from paceline_course.course import Lab
from paceline_course.scratch import run_in_scratch, scratch_folder

_KERNEL = "paceline-labs"


@dataclass(frozen=True)
class Executed:
    """An executed notebook.

    Attributes:
        notebook: The notebook with its outputs, in nbformat's form.
        error: The cell that failed and its error; empty if all cells ran.
        processor_seconds: CPU time of all its processes.
        wall_seconds: Elapsed time.
    """

    notebook: Any
    error: str
    processor_seconds: float
    wall_seconds: float


def execute(notebook: Any, lab: Lab, *, seconds: float) -> Executed:
    """Run a lab's notebook in a scratch folder, with a kernel of this Python.

    Args:
        notebook: The notebook in nbformat's form; it is not changed.
        lab: The lab, for the files that belong to it.
        seconds: Timeout, after which the notebook and all its processes are ended.

    Raises:
        LabError: If it times out, or no kernel can be started.
        ModuleNotFoundError: If nbclient is missing; the extra ``labs`` installs it.
    """
    import nbclient  # noqa: F401  # report a missing library here, not in the child process
    import nbformat

    with scratch_folder() as folder:
        lab.copy_files(folder / "work")
        before, after, facts = (folder / name for name in ("before.ipynb", "after.ipynb", "facts.json"))
        nbformat.write(notebook, before)
        _write_kernel_spec(folder / "jupyter" / "data")
        paths = [str(before), str(after), str(facts)]
        result = run_in_scratch("paceline_course.execution", paths, folder, seconds=seconds)
        if result.code is None:
            raise LabError(f"lab {lab.number} was still running after {seconds:g} s, and was ended.")
        if not facts.exists():
            last = result.stderr.splitlines()[-1:] or [f"exit code {result.code}"]
            raise LabError(f"lab {lab.number} cannot be run here ({last[0]}).")
        return Executed(read_notebook(after), **json.loads(facts.read_text(encoding="utf-8")))


def _write_kernel_spec(data: Path) -> None:
    """Define a kernel that is this Python, whatever other kernels are installed."""
    folder = data / "kernels" / _KERNEL
    folder.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "Paceline", "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")


def main(before: Path, after: Path, facts: Path) -> None:
    """Run a notebook file; write it with its outputs, and the error and times of the run."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, DeadKernelError

    notebook = nbformat.read(before, as_version=4)
    begun, error = time.monotonic(), ""
    try:
        NotebookClient(notebook, timeout=None, kernel_name=_KERNEL).execute()
    except CellExecutionError:
        error = _first_error(notebook)
    except DeadKernelError:
        error = "its kernel died"
    wall = time.monotonic() - begun
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    nbformat.write(notebook, after)
    measured = {
        "error": error,
        "processor_seconds": sum(each.ru_utime + each.ru_stime for each in spent),
        "wall_seconds": wall,
    }
    facts.write_text(json.dumps(measured), encoding="utf-8")


def _first_error(notebook: Any) -> str:
    for at, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", ()):
            if output.output_type == "error":
                first = cell.source.strip().partition("\n")[0]
                return f"cell {at + 1} ({first}): {output.ename}: {output.evalue}"
    return "a cell failed"


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
