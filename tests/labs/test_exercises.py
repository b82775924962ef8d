"""Every lab keeps to its form, and its exercises are open as shipped and done with the answers put in."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from paceline_course.cells import tags_of, with_answers
from paceline_course.checking import check_lab
from paceline_course.course import Lab, all_labs

pytestmark = pytest.mark.needs("jupytext", "IPython")

LABS = pytest.mark.parametrize("lab", all_labs(), ids=lambda lab: lab.number)


def thorough_but(*everyday: str) -> pytest.MarkDecorator:
    """All labs; those that are not named here train much, or are run every day in another way."""
    params = [
        pytest.param(lab, id=lab.number, marks=[pytest.mark.thorough] * (lab.number not in everyday))
        for lab in all_labs()
    ]
    return pytest.mark.parametrize("lab", params)


TAGS = {"setup", "exercise", "check", "hint", "answer", "slide"}
# A slide of a talk: a heading and a few lines.
WORDS_OF_A_SLIDE = 90


def python_of(cell: Any) -> str:
    """A cell's Python: what a ``%%writefile`` cell writes, and lines with IPython's magics left out."""
    first, _, rest = cell.source.partition("\n")
    source = rest if first.startswith("%%") else cell.source
    return re.sub(r"^(\s*)[%!].*$", r"\1pass", source, flags=re.MULTILINE)


@LABS
def test_every_exercise_has_its_check_hint_and_answer(lab: Lab) -> None:
    names = [exercise.name for exercise in lab.exercises]
    assert names == [f"{lab.number}.{number}" for number in range(1, len(names) + 1)]
    cells = lab.notebook.cells
    for exercise in lab.exercises:
        four = (exercise.written, exercise.check, exercise.hint, exercise.answer)
        assert [cells[at].cell_type for at in four] == ["code", "code", "markdown", "code"], exercise.name
        between = set(range(exercise.written, exercise.answer)) - set(four)
        assert all("setup" in tags_of(cells[at]) for at in between), f"{exercise.name}: other cells stand between"
        # A folded cell shows its first line.
        assert cells[exercise.answer].source.startswith(("# Answer\n", "%%writefile ")), exercise.name
        assert "<details>" in cells[exercise.hint].source, exercise.name
        assert "</details>" in cells[exercise.hint].source, exercise.name
        assert cells[exercise.answer].metadata.get("jupyter", {}).get("source_hidden"), f"{exercise.name}: not folded"
        above = "\n".join(cell.source for cell in cells[: exercise.written] if cell.cell_type == "markdown")
        assert f"Exercise {exercise.name}" in above, f"{exercise.name}: nothing says what is to be done"


@LABS
def test_every_cell_is_python_and_has_known_tags(lab: Lab) -> None:
    for at, cell in enumerate(lab.notebook.cells, start=1):
        assert tags_of(cell) <= TAGS, f"cell {at}: {set(tags_of(cell)) - TAGS}"
        if cell.cell_type == "code":
            ast.parse(python_of(cell), f"{lab.path.name}, cell {at}")


@LABS
def test_a_lab_says_what_it_is_and_how_long_it_takes(lab: Lab) -> None:
    first = lab.notebook.cells[0]
    assert first.cell_type == "markdown"
    assert first.source.startswith(f"# Lab {lab.number}: "), "the first cell is the title"
    assert lab.title
    assert lab.minutes is not None, "say in the beginning how many minutes it takes to work through"
    assert (lab.path.parent / "instructor" / f"{lab.number}.md").is_file()


@LABS
def test_a_lab_has_slides_for_a_talk(lab: Lab) -> None:
    assert 8 <= lab.slides <= 14
    for cell in lab.notebook.cells:
        if "slide" in tags_of(cell) and cell.cell_type == "markdown":
            assert cell.source.startswith("#"), f"a slide begins with its heading: {cell.source[:50]}"
            assert len(cell.source.split()) <= WORDS_OF_A_SLIDE, f"too much for a slide: {cell.source[:50]}"


@LABS
def test_the_texts_of_the_labs_hold_no_outputs(lab: Lab) -> None:
    assert all(not cell.get("outputs") for cell in lab.notebook.cells)
    assert "data:image" not in lab.path.read_text(encoding="utf-8")


def written(lab: Lab, notebook: Any, folder: Path) -> Path:
    import jupytext

    path = folder / lab.path.name
    jupytext.write(notebook, path, fmt="py:percent")
    return path


def of_exercises(lab: Lab) -> None:
    if not lab.exercises:
        pytest.skip(f"lab {lab.number} has no exercises: its program is marked by `paceline labs grade`")


@pytest.mark.slow
@pytest.mark.timeout(1000)
@thorough_but("1", "2a")
def test_as_shipped_no_exercise_is_done(lab: Lab, tmp_path: Path) -> None:
    of_exercises(lab)
    assert len(lab.exercises) >= 4
    verdicts = check_lab(lab, written(lab, lab.notebook, tmp_path), seconds=900)
    assert [verdict.name for verdict in verdicts if verdict.is_done] == []
    for verdict in verdicts:
        # What a student reads first is not an error of Python.
        assert not re.match(r"\w+(Error|Exception): |not checked", verdict.missing), verdict


@pytest.mark.slow
@pytest.mark.timeout(1000)
@thorough_but("2b", "4")
def test_with_the_answers_put_in_every_exercise_is_done(lab: Lab, tmp_path: Path) -> None:
    of_exercises(lab)
    answered = with_answers(lab.notebook, lab.exercises)
    verdicts = check_lab(lab, written(lab, answered, tmp_path), seconds=900)
    assert [str(verdict) for verdict in verdicts if not verdict.is_done] == []
