"""A lab is started in a folder, where nothing is ever written over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.errors import LabError
from paceline_course.cells import read_notebook, tags_of
from paceline_course.course import Lab
from paceline_course.starting import start_lab

pytestmark = pytest.mark.needs("jupytext")


def test_the_notebook_is_written_with_answers_folded_and_what_it_comes_with(lab: Lab, tmp_path: Path) -> None:
    path = start_lab(lab, tmp_path / "a" / "b")
    assert path == tmp_path / "a" / "b" / "9b_sums.ipynb"
    assert (path.parent / "beside.txt").read_text() == "beside"
    assert not (path.parent / "reference.py").exists()
    notebook = read_notebook(path)
    assert [cell.source for cell in notebook.cells] == [cell.source for cell in lab.notebook.cells]
    folded = [tags_of(cell) for cell in notebook.cells if cell.metadata.get("jupyter", {}).get("source_hidden")]
    assert folded == [{"answer"}, {"answer"}]
    assert notebook.metadata.kernelspec.name == "python3"
    assert "jupytext" not in notebook.metadata, "or Jupyter would look for a text to keep in step with"
    assert json.loads(path.read_text())["nbformat"] == 4


@pytest.mark.parametrize("name", ["9b_sums.ipynb", "beside.txt"])
def test_what_is_there_is_never_written_over(lab: Lab, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(LabError, match=rf"{name}' exists already.*paceline labs start 9b again"):
        start_lab(lab, tmp_path)
    assert (tmp_path / name).read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [name]


def test_a_folder_that_cannot_be_is_a_sentence(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(LabError, match="cannot be written to"):
        start_lab(lab, tmp_path / "file" / "below")
