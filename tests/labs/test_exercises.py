"""Every lab has the same structure; its exercises are open at first, and the course's answers solve them."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from paceline_course.cells import read_notebook, tags_of
from paceline_course.checking import check_lab
from paceline_course.course import Lab, all_labs

pytestmark = pytest.mark.needs("jupytext", "IPython")

LABS = pytest.mark.parametrize("lab", all_labs(), ids=lambda lab: lab.number)


def thorough_but(*everyday: str) -> pytest.MarkDecorator:
    """All labs; those not named here run only in thorough tests, because they train longer."""
    params = [
        pytest.param(lab, id=lab.number, marks=[pytest.mark.thorough] * (lab.number not in everyday))
        for lab in all_labs()
    ]
    return pytest.mark.parametrize("lab", params)


TAGS = {"setup", "exercise", "check", "hint", "answer", "slide"}
# A slide of a talk: a heading and a few lines.
WORDS_OF_A_SLIDE = 90


def python_of(cell: Any) -> str:
    """The Python of a cell: the file of a ``%%writefile`` cell, or the lines without IPython's magics."""
    first, _, rest = cell.source.partition("\n")
    source = rest if first.startswith("%%") else cell.source
    return re.sub(r"^(\s*)[%!].*$", r"\1pass", source, flags=re.MULTILINE)


@LABS
def test_every_exercise_has_a_check_and_a_hint(lab: Lab) -> None:
    names = [exercise.name for exercise in lab.exercises]
    assert names == [f"{lab.number}.{number}" for number in range(1, len(names) + 1)]
    cells = lab.notebook.cells
    for exercise in lab.exercises:
        four = (exercise.written, exercise.check, exercise.hint, exercise.answer)
        assert [cells[at].cell_type for at in four] == ["code", "code", "markdown", "code"], exercise.name
        between = set(range(exercise.written, exercise.answer)) - set(four)
        assert all("setup" in tags_of(cells[at]) for at in between), f"{exercise.name}: other cells are in between"
        assert cells[exercise.answer].source == f'use_answer("{exercise.name}")'
        assert "<details>" in cells[exercise.hint].source, exercise.name
        assert "</details>" in cells[exercise.hint].source, exercise.name
        above = "\n".join(cell.source for cell in cells[: exercise.written] if cell.cell_type == "markdown")
        assert f"Exercise {exercise.name}" in above, f"{exercise.name}: the text does not describe the exercise"


@LABS
def test_cells_are_python_and_have_known_tags(lab: Lab) -> None:
    for at, cell in enumerate(lab.notebook.cells, start=1):
        assert tags_of(cell) <= TAGS, f"cell {at}: {set(tags_of(cell)) - TAGS}"
        if cell.cell_type == "code":
            ast.parse(python_of(cell), f"{lab.path.name}, cell {at}")


@LABS
def test_title_and_duration(lab: Lab) -> None:
    first = lab.notebook.cells[0]
    assert first.cell_type == "markdown"
    assert first.source.startswith(f"# Lab {lab.number}: "), "the first cell is the title"
    assert lab.title
    assert lab.minutes is not None, "the introduction must state the duration"
    assert (lab.path.parent / "instructor" / f"{lab.number}.md").is_file()


@LABS
def test_slides_fit_a_talk(lab: Lab) -> None:
    assert 8 <= lab.slides <= 14
    for cell in lab.notebook.cells:
        if "slide" in tags_of(cell) and cell.cell_type == "markdown":
            assert cell.source.startswith("#"), f"a slide begins with its heading: {cell.source[:50]}"
            assert len(cell.source.split()) <= WORDS_OF_A_SLIDE, f"too much for a slide: {cell.source[:50]}"


@LABS
def test_labs_contain_no_outputs(lab: Lab) -> None:
    assert all(not cell.get("outputs") for cell in lab.notebook.cells)
    assert "data:image" not in lab.path.read_text(encoding="utf-8")


def written(lab: Lab, notebook: Any, folder: Path) -> Path:
    import jupytext

    path = folder / lab.path.name
    jupytext.write(notebook, path, fmt="py:percent")
    return path


def skip_without_exercises(lab: Lab) -> None:
    if not lab.exercises:
        pytest.skip(f"lab {lab.number} has no exercises: its program is marked by `paceline labs grade`")


@pytest.mark.slow
@pytest.mark.timeout(1000)
@thorough_but("1", "2a")
def test_exercises_are_open_at_first(lab: Lab, tmp_path: Path) -> None:
    skip_without_exercises(lab)
    assert len(lab.exercises) >= 4
    verdicts = check_lab(lab, written(lab, lab.notebook, tmp_path), seconds=900)
    assert [verdict.name for verdict in verdicts if verdict.is_done] == []
    for verdict in verdicts:
        # The first message that a student reads is not a Python error.
        assert not re.match(r"\w+(Error|Exception): |not checked", verdict.missing), verdict


@pytest.mark.slow
@pytest.mark.timeout(1000)
@thorough_but("2b", "4")
def test_answers_solve_the_exercises(lab: Lab, tmp_path: Path) -> None:
    skip_without_exercises(lab)
    answered = read_notebook(lab.path)
    for exercise in lab.exercises:
        answered.cells[exercise.written].source = lab.answers[exercise.name]
    verdicts = check_lab(lab, written(lab, answered, tmp_path), seconds=900)
    assert [str(verdict) for verdict in verdicts if not verdict.is_done] == []
