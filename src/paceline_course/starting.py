"""Copies of a lab for a student to work in."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

from paceline.errors import LabError
from paceline_course.cells import tags_of
from paceline_course.course import Lab


def start_lab(lab: Lab, folder: Path) -> Path:
    """Write the notebook of a lab, and the files it comes with, into a folder.

    Args:
        lab: The lab.
        folder: Where to; it is made if it is not there. What is in it stays as it is.

    Returns:
        The notebook.

    Raises:
        LabError: If one of these files is there already, or nothing can be written there.
    """
    import nbformat

    there = [name for name in (lab.file_name, *(path.name for path in lab.files)) if (folder / name).exists()]
    if there:
        raise LabError(
            f"'{folder / there[0]}' is there already, and may hold your work: go on with it, or start anew in another "
            f"folder, as in `paceline labs start {lab.number} again`."
        )
    text = nbformat.writes(for_student(lab.notebook))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lab.lay_out(folder)
        with (folder / lab.file_name).open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise LabError(f"the lab cannot be written to '{folder}' ({error.strerror}); name another folder.") from error
    return folder / lab.file_name


def for_student(notebook: Any) -> Any:
    """A copy of a lab as a student opens it: answers folded away, nothing run yet."""
    copied = copy.deepcopy(notebook)
    copied.metadata.pop("jupytext", None)  # the notebook is the student's now, and has no text beside it
    for number, cell in enumerate(copied.cells):
        cell["id"] = f"cell-{number:03}"  # the same notebook for all, whoever starts it
        if "answer" in tags_of(cell):
            cell.metadata.setdefault("jupyter", {})["source_hidden"] = True
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return copied


def can_open_jupyter() -> bool:
    """Whether JupyterLab is installed beside this Python."""
    return importlib.util.find_spec("jupyterlab") is not None
