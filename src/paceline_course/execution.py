"""Run a whole notebook from top to bottom, in a process of its own: ``python -m paceline_course.execution``."""

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
from paceline_course.scratch import run_apart, scratch_folder

_KERNEL = "paceline-labs"


@dataclass(frozen=True)
class Executed:
    """A notebook after its run.

    Attributes:
        notebook: With its outputs, as nbformat has it.
        error: What stopped it: the cell and its error; empty if it came to its end.
        processor_seconds: Of all its processes together.
        wall_seconds: By the clock.
    """

    notebook: Any
    error: str
    processor_seconds: float
    wall_seconds: float


def execute(notebook: Any, lab: Lab, *, seconds: float) -> Executed:
    """Run a notebook of a lab in a scratch folder, by a kernel of this Python.

    Args:
        notebook: As nbformat has it; it stays as it is.
        lab: Which lab it is of, for the files that come with it.
        seconds: After so long it and all it started are ended.

    Raises:
        LabError: If it takes longer, or no kernel can be started.
        ModuleNotFoundError: Without nbclient, which the extra ``labs`` brings.
    """
    import nbclient  # noqa: F401  # where it is missing is told here, not in another process
    import nbformat

    with scratch_folder() as folder:
        lab.lay_out(folder / "work")
        before, after, facts = (folder / name for name in ("before.ipynb", "after.ipynb", "facts.json"))
        nbformat.write(notebook, before)
        _name_kernel(folder / "jupyter" / "data")
        ended = run_apart("paceline_course.execution", [str(before), str(after), str(facts)], folder, seconds=seconds)
        if ended.code is None:
            raise LabError(f"lab {lab.number} was still running after {seconds:g} s, and was ended.")
        if not facts.exists():
            last = ended.complaints.splitlines()[-1:] or [f"exit code {ended.code}"]
            raise LabError(f"lab {lab.number} cannot be run here ({last[0]}).")
        return Executed(read_notebook(after), **json.loads(facts.read_text(encoding="utf-8")))


def _name_kernel(data: Path) -> None:
    """Let a kernel be this Python, whatever kernels are installed for whichever other."""
    folder = data / "kernels" / _KERNEL
    folder.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "Paceline", "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")


def main(before: Path, after: Path, facts: Path) -> None:
    """Run a notebook file, and write it with its outputs, and what is to be said of the run."""
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
    said = {
        "error": error,
        "processor_seconds": sum(each.ru_utime + each.ru_stime for each in spent),
        "wall_seconds": wall,
    }
    facts.write_text(json.dumps(said), encoding="utf-8")


def _first_error(notebook: Any) -> str:
    for at, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", ()):
            if output.output_type == "error":
                first = cell.source.strip().partition("\n")[0]
                return f"cell {at + 1} ({first}): {output.ename}: {output.evalue}"
    return "a cell failed"


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
