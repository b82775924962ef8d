"""All of the work is done once, whatever becomes of the processes that do it, and none of them is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline_data.inspect.gather import WorkerFailure, in_parallel

STUCK = """
import os, time
from paceline_data.inspect.gather import in_parallel

def work(piece, note):
    os.write(1, b"%d\\n" % os.getpid())  # in one piece: two write at once
    time.sleep(60)

for _ in in_parallel(work, 100, workers=2):
    pass
"""


def squares(piece: range, note: Callable[[int], None]) -> list[int]:
    return [number**2 for number in piece]


@pytest.mark.parametrize("items", [0, 1, 31, 32, 33, 500])
@pytest.mark.parametrize("workers", [1, 3])
def test_every_item_is_done_once(items: int, workers: int) -> None:
    found = {}
    for done in in_parallel(squares, items, workers=workers):
        assert not isinstance(done, WorkerFailure)
        assert not found.keys() & set(done.piece)
        found |= dict(zip(done.piece, done.result, strict=True))
    assert found == {number: number**2 for number in range(items)}


def test_items_that_end_their_process_are_named_and_the_rest_is_done() -> None:
    deadly = {0, 31, 32, 70, 99}

    def work(piece: range, note: Callable[[int], None]) -> None:
        for item in piece:
            note(item)
            if item in deadly:
                os.kill(os.getpid(), signal.SIGKILL)

    results = list(in_parallel(work, 100, workers=2))
    died = [each for each in results if isinstance(each, WorkerFailure)]
    assert {each.item for each in died} == deadly
    assert {each.exit_code for each in died} == {-9}
    done = [item for each in results if not isinstance(each, WorkerFailure) for item in each.piece]
    assert sorted([*done, *deadly]) == list(range(100))


def test_a_defect_is_told_with_its_trace() -> None:
    def work(piece: range, note: Callable[[int], None]) -> None:
        raise KeyError("the cause")

    with pytest.raises(RuntimeError, match="the cause"):
        list(in_parallel(work, 10, workers=1))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_the_first(number: signal.Signals) -> None:
    command = [sys.executable, "-c", STUCK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as first:
        assert first.stdout is not None
        pids = [int(first.stdout.readline()) for _ in range(2)]
        first.send_signal(number)
        first.wait(timeout=60)
        deadline = time.monotonic() + 30
        while any(map(is_alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert [pid for pid in pids if is_alive(pid)] == []
