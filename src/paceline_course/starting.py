"""Copy a lab for a student to work in."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

from paceline.errors import LabError
from paceline_course.cells import tags_of
from paceline_course.course import Lab


def start_lab(lab: Lab, folder: Path) -> Path:
    """Write a lab's notebook and files into a folder.

    Args:
        lab: The lab.
        folder: The folder; created if missing. Existing files are never overwritten.

    Returns:
        The path of the notebook.

    Raises:
        LabError: If one of the files exists already, or the folder cannot be written.
    """
    import nbformat

    names = (lab.file_name, *(path.name for path in lab.files))
    existing = [name for name in names if (folder / name).exists()]
    if existing:
        raise LabError(
            f"'{folder / existing[0]}' exists already and may contain your work: continue with it, or start again in "
            f"another folder, for example `paceline labs start {lab.number} again`."
        )
    text = nbformat.writes(for_student(lab.notebook))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lab.copy_files(folder)
        with (folder / lab.file_name).open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise LabError(f"the lab cannot be written to '{folder}' ({error.strerror}); name another folder.") from error
    return folder / lab.file_name


def for_student(notebook: Any) -> Any:
    """Return a student's copy of a notebook: answers are folded, and nothing has run yet."""
    copied = copy.deepcopy(notebook)
    copied.metadata.pop("jupytext", None)  # the student's notebook is not paired with a text file
    for number, cell in enumerate(copied.cells):
        cell["id"] = f"cell-{number:03}"  # every student gets the same notebook
        if "answer" in tags_of(cell):
            cell.metadata.setdefault("jupyter", {})["source_hidden"] = True
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return copied


def can_open_jupyter() -> bool:
    """Return whether JupyterLab is installed for this Python."""
    return importlib.util.find_spec("jupyterlab") is not None
