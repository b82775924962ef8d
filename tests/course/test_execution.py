"""Run whole labs in a kernel of this Python, in a scratch folder, without leaving files or processes."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import LabError
from paceline_course.course import Lab
from paceline_course.execution import execute

pytestmark = [pytest.mark.needs("jupytext", "nbclient"), pytest.mark.slow]


def printed(executed: Any, cell: int) -> str:
    return "".join(output.get("text", "") for output in executed.notebook.cells[cell].outputs)


def test_lab_runs_from_top_to_bottom_with_this_python(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    lab.notebook.cells[2].source = "import sys; print(sys.executable, open('extra.txt').read())"
    executed = execute(lab.notebook, lab, seconds=200)
    assert executed.error == ""
    assert printed(executed, 2) == f"{sys.executable} extra\n"
    assert printed(executed, 3) == "the sum is 6\n"
    assert printed(executed, lab.exercises[0].check) == "9b.1  not yet: nothing is written here yet\n"
    assert 0.1 < executed.processor_seconds < 100
    assert "outputs" not in lab.notebook.cells[3] or not lab.notebook.cells[3].outputs
    assert list(home.rglob("*")) == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\n1 / 0", r"cell 3 \(x = 1\): ZeroDivisionError: division by zero"),
        ("import os\nos._exit(0)", "its kernel died"),
    ],
)
def test_error_of_a_failing_lab(lab: Lab, source: str, message: str) -> None:
    lab.notebook.cells[2].source = source
    assert re.fullmatch(message, execute(lab.notebook, lab, seconds=200).error)


def test_timeout_ends_all_processes(lab: Lab) -> None:
    lab.notebook.cells[
        2
    ].source = "from paceline_course import run\nrun('python -c \"while True: pass\"', seconds=1000)"
    with pytest.raises(LabError, match="lab 9b was still running after 20 s, and was ended"):
        execute(lab.notebook, lab, seconds=20)
