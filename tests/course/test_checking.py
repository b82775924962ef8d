"""The course's own checks decide, whatever a student's notebook contains, does or starts."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import LabError
from paceline_course.cells import read_notebook
from paceline_course.checking import check_lab
from paceline_course.course import Lab

pytestmark = pytest.mark.needs("jupytext", "nbformat", "IPython")

RIGHT = {"9b.1": "def add(values):\n    return sum(values)", "9b.2": "%%writefile guess.py\ntotal = 6"}
Student = Callable[..., Path]


def missing(lab: Lab, file: Path, seconds: float = 100) -> dict[str, str]:
    """What each exercise lacks; an empty string if it is done."""
    verdicts = check_lab(lab, file, seconds=seconds)
    assert [verdict.name for verdict in verdicts] == ["9b.1", "9b.2"]
    assert all(verdict.is_done == (not verdict.missing) for verdict in verdicts)
    return {verdict.name: verdict.missing for verdict in verdicts}


def test_open_exercises_and_right_answers(lab: Lab, student: Student, tmp_path: Path) -> None:
    import jupytext

    assert missing(lab, student({})) == {
        "9b.1": "nothing is written here yet",
        "9b.2": "write the sum into the file, as a number",
    }
    assert missing(lab, student(RIGHT)) == {"9b.1": "", "9b.2": ""}
    text = tmp_path / "mine.py"
    jupytext.write(read_notebook(student(lab.answers)), text, fmt="py:percent")
    assert "# %%writefile" in text.read_text()
    assert missing(lab, text) == {"9b.1": "", "9b.2": ""}


def test_only_setup_exercises_and_checks_run(lab: Lab, student: Student) -> None:
    def break_unused_cell(notebook: Any) -> None:
        notebook.cells[2].source = "raise RuntimeError('no check needs this cell')"

    assert "Path" in lab.notebook.cells[2].source, "a name that no cell imports"
    assert missing(lab, student(RIGHT, break_unused_cell)) == {"9b.1": "", "9b.2": ""}


@pytest.mark.parametrize(
    ("source", "message"),
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
def test_message_about_an_unfinished_exercise(lab: Lab, student: Student, source: str, message: str) -> None:
    found = missing(lab, student({**RIGHT, "9b.1": source}))
    assert re.fullmatch(message, found["9b.1"]), found
    # The answer replaces the unfinished exercise, as in the notebook.
    assert found["9b.2"] == ""


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import os\nos._exit(3)", "it ended Python with exit code 3"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "it ended Python with SIGKILL"),
    ],
)
def test_exercise_that_ends_python(lab: Lab, student: Student, source: str, message: str) -> None:
    found = missing(lab, student({**RIGHT, "9b.1": source}))
    assert found == {"9b.1": message, "9b.2": f"not checked, because 9b.1{message.removeprefix('it')}"}


@pytest.mark.parametrize(
    "source",
    [
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'while True: pass'], start_new_session=True)",
        # Each of these runs until the timeout.
        pytest.param("while True:\n    pass", marks=pytest.mark.thorough),
        pytest.param(
            "while True:\n    try:\n        print('x' * 10000)\n    except BaseException:\n        pass",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_timeout_ends_all_processes(lab: Lab, student: Student, source: str) -> None:
    begun = time.monotonic()
    found = missing(lab, student({**RIGHT, "9b.2": source}), seconds=40)
    assert found["9b.1"] == ""
    assert found["9b.2"].startswith("it was still running after 40 s: is there an infinite loop?")
    assert time.monotonic() - begun < 200


def test_what_a_cell_prints_is_not_kept(lab: Lab, student: Student) -> None:
    source = """
from paceline.telemetry.clock import peak_resident_bytes
for _ in range(200):
    print("x" * 10**7)
assert peak_resident_bytes() < 10**9, peak_resident_bytes()
"""
    assert missing(lab, student({**RIGHT, "9b.1": source + RIGHT["9b.1"]})) == {"9b.1": "", "9b.2": ""}


def test_use_answer_does_nothing_in_a_check(lab: Lab, student: Student) -> None:
    source = "from paceline_course import use_answer\nuse_answer('1.1')\nadd = training_hours"
    assert missing(lab, student({**RIGHT, "9b.1": source}))["9b.1"].startswith("NameError: name 'training_hours'")


def test_changed_checks_do_not_count(lab: Lab, student: Student) -> None:
    def weaken_check(notebook: Any) -> None:
        notebook.cells[lab.exercises[0].check].source = 'with exercise("9b.1"):\n    pass'

    assert missing(lab, student({}, weaken_check))["9b.1"] == "nothing is written here yet"


def test_added_and_moved_cells_belong_to_the_exercise(lab: Lab, student: Student) -> None:
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


def test_changed_setup_cells_run(lab: Lab, student: Student) -> None:
    def prepare(notebook: Any) -> None:
        notebook.cells[1].source = "from math import fsum"

    own = {**RIGHT, "9b.1": "def add(values):\n    return round(fsum(values))"}
    assert missing(lab, student(own, prepare)) == {"9b.1": "", "9b.2": ""}


def test_deleted_exercise(lab: Lab, student: Student) -> None:
    def delete(notebook: Any) -> None:
        del notebook.cells[lab.exercises[0].check]

    assert missing(lab, student(RIGHT, delete)) == {
        "9b.1": "its cell, or the check after it, is missing from the notebook",
        "9b.2": "",
    }


def test_notebook_of_another_topic(lab: Lab, student: Student) -> None:
    def empty(notebook: Any) -> None:
        notebook.cells.clear()

    with pytest.raises(LabError, match="has no exercise of lab 9b"):
        check_lab(lab, student({}, empty), seconds=100)


def test_failing_setup(lab: Lab, student: Student) -> None:
    path = student({})
    lab.notebook.cells[1].source = "import no_such_library"
    with pytest.raises(LabError, match=r"set-up of lab 9b failed: ModuleNotFoundError: No module"):
        check_lab(lab, path, seconds=100)


def test_nothing_is_written_next_to_the_notebook_or_in_home(
    lab: Lab, student: Student, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    (tmp_path / "temporary").mkdir()  # other tests use the usual folder at the same time
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    path = student(RIGHT)
    before = sorted(tmp_path.rglob("*"))
    assert missing(lab, path) == {"9b.1": "", "9b.2": ""}
    assert sorted(tmp_path.rglob("*")) == before
