"""Purposes of notebook cells, by their tags (docs/decisions/0064-course.md)."""

from __future__ import annotations

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
    """Positions of an exercise's cells in a notebook.

    Attributes:
        name: Name, such as ``2a.3``.
        written: The cell the student edits.
        check: The cell that checks it.
        hint: The cell with a hint.
        answer: The cell that lets later cells use the course's answer if the exercise is not done.
    """

    name: str
    written: int
    check: int
    hint: int
    answer: int


def read_notebook(path: Path) -> Any:
    """Read a notebook: an ``.ipynb`` file, or a ``.py`` file in percent format.

    Args:
        path: The file.

    Returns:
        A ``NotebookNode`` of nbformat.

    Raises:
        LabError: If the file cannot be read or is not a notebook.
        ModuleNotFoundError: If jupytext is missing; the extra ``labs`` installs it.
    """
    import jupytext
    from nbformat import ValidationError

    if path.suffix not in SUFFIXES:
        raise LabError(f"'{path}' is not a notebook: its name must end in {' or '.join(SUFFIXES)}.")
    try:
        text = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # older notebooks have no cell ids
            notebook = jupytext.reads(text, fmt="ipynb" if path.suffix == ".ipynb" else "py:percent")
        for cell in notebook.cells:
            tags_of(cell)
            _ = cell.cell_type, cell.source.strip()
    except OSError as error:
        raise LabError(f"'{path}' cannot be read ({error.strerror}).") from error
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, ValidationError) as error:
        why = str(error).partition("\n")[0][:100]
        raise LabError(
            f"'{path}' is not a valid notebook ({type(error).__name__}: {why}). Undo your last change to it, or start "
            "the lab again in another folder."
        ) from error
    return notebook


def tags_of(cell: Any) -> frozenset[str]:
    """Return the tags of a cell."""
    tags = cell.metadata.get("tags", [])
    if not isinstance(tags, list):
        raise TypeError(f"tags must be a list, not {tags!r}")
    return frozenset(map(str, tags))


def names_in(cell: Any) -> list[str]:
    """Return the names of the exercises that a cell checks."""
    return _NAMED.findall(cell.source)


def exercises_of(notebook: Any, name: str) -> Iterator[Exercise]:
    """Find the exercises of a shipped lab.

    Args:
        notebook: The lab's notebook.
        name: The lab's name, for messages.

    Raises:
        LabError: If an exercise is not followed by its check, hint and answer.
    """
    cells = notebook.cells
    parts = ("check", "hint", "answer")
    tagged = [(at, part) for at, cell in enumerate(cells) for part in ("exercise", *parts) if part in tags_of(cell)]
    for number in range(0, len(tagged), 4):
        group = tagged[number : number + 4]
        if [part for _, part in group] != ["exercise", *parts]:
            place = group[0][0] + 1
            raise LabError(f"{name}: the exercise at cell {place} should be followed by its {', '.join(parts)}.")
        at, check, hint, answer = (place for place, _ in group)
        named = names_in(cells[check])
        if len(named) != 1:
            raise LabError(f"{name}: cell {check + 1} checks {len(named)} exercises; it should check one.")
        yield Exercise(named[0], at, check, hint, answer)
