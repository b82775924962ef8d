"""Run the cells of a check, in a process of its own: ``python -m paceline_course.session``.

Not a Jupyter kernel: an IPython shell, which is there in a moment, and knows ``%%writefile`` as notebooks do.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from paceline_course.exercises import VERDICTS


def main(plan: Path, notes: Path) -> None:
    """Run cells in order, and append what came of each to a file.

    Args:
        plan: JSON: a list of ``{"kind", "exercise", "source"}``, as :mod:`paceline_course.checking` writes it.
        notes: For each cell, a line ``{"begun": …}`` with its position, and another one when it has ended.
    """
    shell = _shell()
    sys.path.append("")  # what cells write into files can be imported, and replaces no library
    failed: dict[str, str] = {}  # exercises whose own cells raised
    with notes.open("a", encoding="utf-8") as file, Path(os.devnull).open("w") as nowhere:
        # What cells print is not for the terminal, and may have no end.
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

    return InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))


def _run(shell: Any, source: str) -> str:
    """Run a cell; return what it raised, in one line, or nothing."""
    result = shell.run_cell(source)
    error = result.error_before_exec or result.error_in_exec
    if error is None:
        return ""
    if isinstance(error, NotImplementedError):
        return "nothing is written here yet"
    if isinstance(error, SyntaxError):  # its text ends in the name of a file that IPython has made up
        return f"{type(error).__name__}: {error.msg}, line {error.lineno} of the cell"
    return " ".join(f"{type(error).__name__}: {error}".split())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
