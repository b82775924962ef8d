"""Start labs: write a notebook without answers, and never overwrite a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.errors import LabError
from paceline_course.cells import read_notebook
from paceline_course.course import Lab, all_labs
from paceline_course.starting import start_lab

pytestmark = pytest.mark.needs("jupytext")


def test_notebook_and_files_are_written(lab: Lab, tmp_path: Path) -> None:
    path = start_lab(lab, tmp_path / "a" / "b")
    assert path == tmp_path / "a" / "b" / "9b_sums.ipynb"
    assert (path.parent / "extra.txt").read_text() == "extra"
    notebook = read_notebook(path)
    assert [cell.source for cell in notebook.cells] == [cell.source for cell in lab.notebook.cells]
    assert notebook.metadata.kernelspec.name == "python3"
    assert "jupytext" not in notebook.metadata, "Jupyter would look for a paired text file"
    assert json.loads(path.read_text())["nbformat"] == 4


@pytest.mark.parametrize("lab", all_labs(), ids=lambda lab: lab.number)
def test_participants_get_no_answers(lab: Lab, tmp_path: Path) -> None:
    """Compare code lines of the answers with everything that `labs start` writes."""
    start_lab(lab, tmp_path)
    given = {line.strip() for path in tmp_path.iterdir() for line in text_of(path).splitlines()}
    assert [name for name, source in lab.answers.items() if code_of(source) <= given] == []
    reference = code_of((lab.path.parent / "instructor" / "reference.py").read_text())
    assert len(reference & given) < len(reference) / 2
    assert not any("<summary>Answer" in line for line in given)


def text_of(path: Path) -> str:
    return "\n".join(cell.source for cell in read_notebook(path).cells) if path.suffix == ".ipynb" else path.read_text()


def code_of(source: str) -> set[str]:
    """Lines of a program that are neither empty nor comments, imports or the first line of a function."""
    lines = {line.strip() for line in source.splitlines()}
    return {line for line in lines if line and not line.startswith(("#", "%%", "import ", "from ", "def ", '"""'))}


@pytest.mark.parametrize("name", ["9b_sums.ipynb", "extra.txt"])
def test_existing_files_are_never_overwritten(lab: Lab, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(LabError, match=rf"{name}' exists already.*paceline labs start 9b again"):
        start_lab(lab, tmp_path)
    assert (tmp_path / name).read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [name]


def test_unusable_folder(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(LabError, match="cannot be written to"):
        start_lab(lab, tmp_path / "file" / "below")
