"""Copy a lab for a student to work in."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import LabError
from paceline_course.cells import read_notebook
from paceline_course.course import Lab


def start_lab(lab: Lab, folder: Path) -> Path:
    """Write a lab's notebook and files into a folder; they contain no answers.

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
    notebook = read_notebook(lab.path)
    del notebook.metadata["jupytext"]  # the student's notebook is not paired with a text file
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:03}"  # every student gets the same notebook
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lab.copy_files(folder)
        with (folder / lab.file_name).open("x", encoding="utf-8") as file:
            file.write(nbformat.writes(notebook))
    except OSError as error:
        raise LabError(f"the lab cannot be written to '{folder}' ({error.strerror}); name another folder.") from error
    return folder / lab.file_name
