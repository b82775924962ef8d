"""Exercises are checked by the shipped checks, whatever a student's notebook has, does or starts."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import LabError
from paceline_course.cells import with_answers
from paceline_course.checking import check_lab
from paceline_course.course import Lab

pytestmark = pytest.mark.needs("jupytext", "IPython")

RIGHT = {"9b.1": "def add(values):\n    return sum(values)", "9b.2": "%%writefile guess.py\ntotal = 6"}
Student = Callable[..., Path]


def missing(lab: Lab, file: Path, seconds: float = 100) -> dict[str, str]:
    """What is missing of each exercise, nothing for one that is done."""
    verdicts = check_lab(lab, file, seconds=seconds)
    assert [verdict.name for verdict in verdicts] == ["9b.1", "9b.2"]
    assert all(verdict.is_done == (not verdict.missing) for verdict in verdicts)
    return {verdict.name: verdict.missing for verdict in verdicts}


def test_as_shipped_nothing_is_done_and_with_answers_all_is(lab: Lab, student: Student, tmp_path: Path) -> None:
    import jupytext

    assert missing(lab, student({})) == {
        "9b.1": "nothing is written here yet",
        "9b.2": "write the sum into the file, as a number",
    }
    assert missing(lab, student(RIGHT)) == {"9b.1": "", "9b.2": ""}
    text = tmp_path / "mine.py"
    jupytext.write(with_answers(lab.notebook, lab.exercises), text, fmt="py:percent")
    assert "# %%writefile" in text.read_text()
    assert missing(lab, text) == {"9b.1": "", "9b.2": ""}


def test_only_set_up_exercises_and_checks_are_run(lab: Lab, student: Student) -> None:
    def spoil(notebook: Any) -> None:
        notebook.cells[2].source = "raise RuntimeError('not needed by any check')"

    assert "Path" in lab.notebook.cells[2].source, "which no cell imports"
    assert missing(lab, student(RIGHT, spoil)) == {"9b.1": "", "9b.2": ""}


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def add(values):\n    return 7", r"the sum of \[1, 2, 3\] is not 7"),
        ("def add(values):\n    return values[9]", "IndexError: list index out of range"),
        ("def add(values):\nreturn 3", "IndentationError: expected an indented block.*, line 2 of the cell"),
        ("def plus(values):\n    return 3", r"NameError: name 'add' is not defined \(only set-up .*\)"),
        ("add = ...", "TypeError: 'ellipsis' object is not callable"),
        ("raise NotImplementedError", "nothing is written here yet"),
        ("import sys\nsys.exit(3)", "SystemExit: 3"),
        ("input('a number: ')", "(StdinNotImplementedError|EOFError).*"),
        ("", r"NameError: name 'add' is not defined \(only set-up .*\)"),
        ("%%no_such_magic\n1", ".+"),
    ],
)
def test_what_is_missing_is_said(lab: Lab, student: Student, source: str, said: str) -> None:
    found = missing(lab, student({**RIGHT, "9b.1": source}))
    assert re.fullmatch(said, found["9b.1"]), found
    # The answer stands in for what is not done, as in the notebook.
    assert found["9b.2"] == ""


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import os\nos._exit(3)", "it ended Python with exit code 3"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "it ended Python with SIGKILL"),
    ],
)
def test_an_exercise_that_ends_python_is_named(lab: Lab, student: Student, source: str, said: str) -> None:
    found = missing(lab, student({**RIGHT, "9b.1": source}))
    assert found == {"9b.1": said, "9b.2": f"not checked, because 9b.1{said.removeprefix('it')}"}


@pytest.mark.parametrize(
    "source",
    [
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'while True: pass'], start_new_session=True)",
        # Each takes its full time.
        pytest.param("while True:\n    pass", marks=pytest.mark.thorough),
        pytest.param(
            "while True:\n    try:\n        print('x' * 10000)\n    except BaseException:\n        pass",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_an_exercise_without_end_is_ended_with_all_it_started(lab: Lab, student: Student, source: str) -> None:
    begun = time.monotonic()
    found = missing(lab, student({**RIGHT, "9b.2": source}), seconds=40)
    assert found["9b.1"] == ""
    assert found["9b.2"].startswith("it was still running after 40 s: is there an infinite loop?")
    assert time.monotonic() - begun < 200


def test_the_students_own_checks_do_not_count(lab: Lab, student: Student) -> None:
    def soften(notebook: Any) -> None:
        notebook.cells[lab.exercises[0].check].source = 'with exercise("9b.1"):\n    pass'

    assert missing(lab, student({}, soften))["9b.1"] == "nothing is written here yet"


def test_cells_that_a_student_adds_or_moves_belong_to_the_exercise(lab: Lab, student: Student) -> None:
    from nbformat.v4 import new_code_cell

    def split(notebook: Any) -> None:
        at = lab.exercises[0].written
        notebook.cells.insert(at + 1, new_code_cell("def add(values):\n    return total(values)"))
        notebook.cells[at].source = "def total(values):\n    return sum(values)"

    def swap(notebook: Any) -> None:
        first = lab.exercises[1].written
        notebook.cells[:] = [*notebook.cells[:2], *notebook.cells[first:], *notebook.cells[2:first]]

    assert missing(lab, student({"9b.2": RIGHT["9b.2"]}, split)) == {"9b.1": "", "9b.2": ""}
    assert missing(lab, student(RIGHT, swap)) == {"9b.1": "", "9b.2": ""}


def test_a_set_up_that_a_student_changes_counts(lab: Lab, student: Student) -> None:
    def prepare(notebook: Any) -> None:
        notebook.cells[1].source = "from math import fsum"

    own = {**RIGHT, "9b.1": "def add(values):\n    return round(fsum(values))"}
    assert missing(lab, student(own, prepare)) == {"9b.1": "", "9b.2": ""}


def test_an_exercise_that_was_deleted_is_told(lab: Lab, student: Student) -> None:
    def delete(notebook: Any) -> None:
        del notebook.cells[lab.exercises[0].check]

    assert missing(lab, student(RIGHT, delete)) == {
        "9b.1": "its cell, or the check after it, is missing from the notebook",
        "9b.2": "",
    }


def test_a_notebook_of_something_else_is_a_sentence(lab: Lab, student: Student) -> None:
    def empty(notebook: Any) -> None:
        notebook.cells.clear()

    with pytest.raises(LabError, match="has no exercise of lab 9b"):
        check_lab(lab, student({}, empty), seconds=100)


def test_a_lab_whose_set_up_fails_is_a_sentence(lab: Lab, student: Student) -> None:
    path = student({})
    lab.notebook.cells[1].source = "import no_such_library"
    with pytest.raises(LabError, match=r"set-up of lab 9b failed: ModuleNotFoundError: No module"):
        check_lab(lab, path, seconds=100)


def test_nothing_is_written_beside_the_notebook_or_at_home(
    lab: Lab, student: Student, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    (tmp_path / "temporary").mkdir()  # of its own: other tests use the usual one meanwhile
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    path = student(RIGHT)
    before = sorted(tmp_path.rglob("*"))
    assert missing(lab, path) == {"9b.1": "", "9b.2": ""}
    assert sorted(tmp_path.rglob("*")) == before
