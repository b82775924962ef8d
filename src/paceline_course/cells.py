"""Purposes of notebook cells, by their tags (docs/decisions/0064-course.md)."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import LabError

SUFFIXES = (".ipynb", ".py")
_NAMED = re.compile(r"""\bexercise\(\s*["']([^"']+)["']""")


@dataclass(frozen=True)
class Exercise:
    """Where an exercise's cells stand in a notebook.

    Attributes:
        name: Such as ``2a.3``.
        written: The cell in which a student writes.
        check: The cell that says whether it is done.
        hint: The cell with a hint.
        answer: The cell with an answer.
    """

    name: str
    written: int
    check: int
    hint: int
    answer: int


def read_notebook(path: Path) -> Any:
    """Read a notebook, or one that is kept as text in percent format.

    Args:
        path: An ``.ipynb`` or ``.py`` file.

    Returns:
        The ``NotebookNode`` of nbformat.

    Raises:
        LabError: If there is no such file, or it is no notebook.
        ModuleNotFoundError: Without jupytext, which the extra ``labs`` brings.
    """
    import jupytext
    from nbformat import ValidationError

    if path.suffix not in SUFFIXES:
        raise LabError(f"'{path}' is no notebook: its name must end in {' or '.join(SUFFIXES)}.")
    try:
        text = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of cells without an id, which older notebooks have not
            notebook = jupytext.reads(text, fmt="ipynb" if path.suffix == ".ipynb" else "py:percent")
        for cell in notebook.cells:
            tags_of(cell)
            _ = cell.cell_type, cell.source.strip()
    except OSError as error:
        raise LabError(f"'{path}' cannot be read ({error.strerror}).") from error
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, ValidationError) as error:
        why = str(error).partition("\n")[0][:100]
        raise LabError(
            f"'{path}' is no notebook ({type(error).__name__}: {why}). If it was one, undo the last change to it, or "
            "start the lab again in another folder."
        ) from error
    return notebook


def tags_of(cell: Any) -> frozenset[str]:
    """The tags of a cell."""
    tags = cell.metadata.get("tags", [])
    if not isinstance(tags, list):
        raise TypeError(f"tags are a list, not {tags!r}")
    return frozenset(map(str, tags))


def names_in(cell: Any) -> list[str]:
    """The exercises that a cell checks."""
    return _NAMED.findall(cell.source)


def exercises_of(notebook: Any, name: str) -> Iterator[Exercise]:
    """Find the exercises of a lab as it is shipped.

    Args:
        notebook: The lab's.
        name: Its name, for messages.

    Raises:
        LabError: If one is not followed by its check, hint and answer.
    """
    cells = notebook.cells
    parts = ("check", "hint", "answer")
    told = [(at, part) for at, cell in enumerate(cells) for part in ("exercise", *parts) if part in tags_of(cell)]
    for number in range(0, len(told), 4):
        group = told[number : number + 4]
        if [part for _, part in group] != ["exercise", *parts]:
            place = group[0][0] + 1
            raise LabError(f"{name}: from cell {place} on an exercise should be followed by its {', '.join(parts)}.")
        at, check, hint, answer = (place for place, _ in group)
        named = names_in(cells[check])
        if len(named) != 1:
            raise LabError(f"{name}: cell {check + 1} checks {len(named)} exercises; it should be one.")
        yield Exercise(named[0], at, check, hint, answer)


def with_answers(notebook: Any, exercises: tuple[Exercise, ...]) -> Any:
    """A copy of a lab in which every exercise is answered."""
    answered = copy.deepcopy(notebook)
    for exercise in exercises:
        answered.cells[exercise.written].source = notebook.cells[exercise.answer].source
    return answered
