"""Read notebooks, also damaged ones, and find exercises by the tags of their cells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.errors import LabError
from paceline_course.cells import exercises_of, read_notebook, tags_of
from paceline_course.course import Lab

pytestmark = pytest.mark.needs("jupytext")


@pytest.mark.parametrize("missing", ["check", "hint", "answer"])
def test_exercise_with_a_missing_cell(lab: Lab, missing: str) -> None:
    at = next(at for at, cell in enumerate(lab.notebook.cells) if missing in tags_of(cell))
    del lab.notebook.cells[at]
    with pytest.raises(LabError, match="should be followed by its check, hint, answer"):
        list(exercises_of(lab.notebook, "9b"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "null",
        "{}",
        '{"cells": 3, "nbformat": 4, "nbformat_minor": 5, "metadata": {}}',
        '{"cells": [3], "nbformat": 4, "nbformat_minor": 5, "metadata": {}}',
        '{"cells": [{"cell_type": "code"}], "nbformat": 4, "nbformat_minor": 5, "metadata": {}}',
        '{"cells": [{"cell_type": "code", "metadata": {"tags": 3}, "source": ""}], "nbformat": 4, "metadata": {}}',
        '{"cells": [], "nbformat": "x", "metadata": {}}',
        '{"cells": [], "nbformat": 99, "nbformat_minor": 5, "metadata": {}}',
        '{"worksheets": 4, "nbformat": 3, "nbformat_minor": 0, "metadata": {}}',
    ],
)
def test_invalid_notebook(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.ipynb"
    path.write_text(text)
    with pytest.raises(LabError, match=r"broken.ipynb' is not a valid notebook \("):
        read_notebook(path)


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"gone.ipynb' cannot be read \(No such file"):
        read_notebook(tmp_path / "gone.ipynb")
    with pytest.raises(LabError, match=r"must end in .ipynb or .py"):
        read_notebook(tmp_path / "mine.txt")
    (tmp_path / "x.py").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LabError, match="is not a valid notebook"):
        read_notebook(tmp_path / "x.py")
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(LabError, match="cannot be read"):
        read_notebook(tmp_path / "folder.py")


def test_old_notebook_without_cell_ids_gives_no_warning(tmp_path: Path) -> None:
    cell = {"cell_type": "code", "metadata": {}, "source": ["a = 1\n", "b"], "outputs": [], "execution_count": None}
    path = tmp_path / "old.ipynb"
    path.write_text(json.dumps({"cells": [cell], "nbformat": 4, "nbformat_minor": 5, "metadata": {}}))
    assert read_notebook(path).cells[0].source == "a = 1\nb"
