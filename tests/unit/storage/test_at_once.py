"""Several at once, the first error ends it, and no interpreter waits for what is never answered."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from paceline.storage.remote import run_concurrently, run_in_thread

_NEVER_ANSWERED = """
import threading, time
from paceline.storage.remote import run_concurrently, run_in_thread
run_in_thread(lambda: run_concurrently(lambda _: time.sleep(300), range(9), threads=2, name="x"), name="y")
time.sleep(0.2)
"""


def test_each_is_taken_once() -> None:
    taken, lock = list[int](), threading.Lock()

    def take(number: int) -> None:
        with lock:
            taken.append(number)

    run_concurrently(take, range(50), threads=4, name="x")
    run_concurrently(take, (), threads=4, name="x")
    assert sorted(taken) == list(range(50))


def test_after_an_error_nothing_more_is_begun() -> None:
    taken = list[int]()

    def fail(number: int) -> None:
        taken.append(number)
        raise ValueError(number)

    with pytest.raises(ValueError, match="0"):
        run_concurrently(fail, range(50), threads=1, name="x")
    assert taken == [0]
    with pytest.raises(ValueError, match="7"):
        run_in_thread(lambda: fail(7), name="x").result(30)


def test_the_interpreter_ends_without_an_answer() -> None:
    subprocess.run([sys.executable, "-c", _NEVER_ANSWERED], check=True, timeout=60)
