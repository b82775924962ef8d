"""Verdicts on exercises, and answers that let a notebook continue."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.needs("IPython")

CELLS = """
from paceline_course import exercise, use_answer
from paceline_course.session import _shell

shell = _shell()
shell.user_ns.update(exercise=exercise, use_answer=use_answer)
shell.run_cell('use_answer("1.3")')
before = shell.user_ns["times_less_noise"]
shell.run_cell("with exercise('1.3'): raise NotImplementedError")
shell.run_cell('times_less_noise = ...; use_answer("1.3")')
undone = shell.user_ns["times_less_noise"]
shell.run_cell('times_less_noise = 9.5\\nwith exercise("1.3"): assert times_less_noise\\nuse_answer("1.3")')
print([before, undone, shell.user_ns["times_less_noise"]])
"""


def test_answer_is_used_unless_the_exercise_is_done() -> None:
    done = subprocess.run([sys.executable, "-c", CELLS], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.splitlines() == [
        "1.3  later cells use the course's answer; run your own cell again before you repeat the check",
        "1.3  not yet: nothing is written here yet",
        "1.3  later cells use the course's answer; run your own cell again before you repeat the check",
        "1.3  done",
        "1.3  later cells use your code",
        "[10, 10, 9.5]",
    ]
