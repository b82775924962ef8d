"""Run the cells of a check in a separate process: ``python -m paceline_course.session``.

An IPython shell runs them, not a Jupyter kernel: it starts faster and also knows ``%%writefile``.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import paceline_course
from paceline_course.exercises import VERDICTS


def main(plan: Path, notes: Path) -> None:
    """Run cells in order, and append the result of each to a file.

    Args:
        plan: JSON file: a list of ``{"kind", "exercise", "source"}`` from :mod:`paceline_course.checking`.
        notes: Output file: for each cell a line ``{"begun": position}``, and a line ``{"ended": position, …}``.
    """
    paceline_course.use_answer = lambda name: None  # the check is of the student's own code
    shell = _shell()
    sys.path.append("")  # modules that cells write can be imported but do not shadow libraries
    failed: dict[str, str] = {}  # errors raised by students' cells, by exercise
    with notes.open("a", encoding="utf-8") as file, Path(os.devnull).open("w") as nowhere:
        # Discard what cells print; there may be no end to it.
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        for position, step in enumerate(json.loads(plan.read_text(encoding="utf-8"))):
            print(json.dumps({"begun": position}), file=file, flush=True)
            if step["kind"] == "check" and step["exercise"] in failed:
                continue
            VERDICTS.clear()
            error = _run(shell, step["source"])
            if step["kind"] == "student" and error:
                failed.setdefault(step["exercise"], error)
            verdicts = [vars(verdict) for verdict in VERDICTS.values()]
            print(json.dumps({"ended": position, "error": error, "verdicts": verdicts}), file=file, flush=True)


def _shell() -> Any:
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    # IPython would keep all that a cell prints, until the memory is full.
    shell._tee = lambda channel: nullcontext()  # noqa: SLF001  # no option turns it off
    return shell


def _run(shell: Any, source: str) -> str:
    """Run a cell; return its error in one line, or an empty string."""
    result = shell.run_cell(source)
    error = result.error_before_exec or result.error_in_exec
    if error is None:
        return ""
    if isinstance(error, NotImplementedError):
        return "nothing is written here yet"
    if isinstance(error, SyntaxError):  # its text ends in a file name that IPython has made up
        return f"{type(error).__name__}: {error.msg}, line {error.lineno} of the cell"
    return " ".join(f"{type(error).__name__}: {error}".split())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
