"""Distinguish hung processes from working ones, and end the processes they leave behind."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline_course.grading.supervise import ResourceLimits, Supervisor, end_group

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")

BUSY = "while True: pass"
IDLE = "import time; time.sleep(600)"


def watch(code: str, limits: ResourceLimits, until: Callable[[str], bool], seconds: float = 60) -> str:
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    supervisor, begin, violation = Supervisor(limits), time.monotonic(), ""
    try:
        while not until(violation) and time.monotonic() - begin < seconds:
            time.sleep(0.05)
            violation = supervisor.violation([process.pid])
    finally:
        end_group(process.pid)
        process.wait()
    return violation


def test_waiting_is_a_hang() -> None:
    assert watch(IDLE, ResourceLimits(idle_seconds=1, poll_seconds=0.1), bool) == "hang"


def test_waking_briefly_is_a_hang() -> None:
    # Four processes that about one sample in twenty finds awake, like watchdog threads.
    code = (
        "import os, time\nos.fork(), os.fork()\n"
        "while True:\n    time.sleep(0.5)\n    end = time.process_time() + 0.002\n"
        "    while time.process_time() < end:\n        pass\n"
    )
    assert watch(code, ResourceLimits(idle_seconds=2, poll_seconds=0.1), bool) == "hang"


def test_little_regular_work_is_not_a_hang() -> None:
    code = "import time\nwhile True:\n    time.sleep(0.2)\n    sum(range(3_000_000))\n"
    limits = ResourceLimits(idle_seconds=2, poll_seconds=0.1, processor_seconds=1)
    assert watch(code, limits, bool) == "processor time"


def test_work_ends_at_the_processor_time_limit() -> None:
    limits = ResourceLimits(idle_seconds=0.5, processor_seconds=2, poll_seconds=0.1)
    assert watch(BUSY, limits, bool) == "processor time"


def test_too_many_processes() -> None:
    code = "import os, time\nfor _ in range(6):\n    if os.fork() == 0:\n        break\ntime.sleep(600)"
    assert watch(code, ResourceLimits(processes=4, poll_seconds=0.05, idle_seconds=30), bool) == "processes"


def test_time_limit() -> None:
    assert watch(BUSY, ResourceLimits(seconds=0.5, poll_seconds=0.1), bool) == "time"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt orphans")
def test_grandchildren_are_ended_whatever_their_environment() -> None:
    code = f"""
import os, subprocess, sys
from paceline_course.grading.supervise import adopt_orphans, descendants, end_children
adopt_orphans()
inner = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', {IDLE!r}], env={{}}, start_new_session=True)"
subprocess.run([sys.executable, "-c", inner], check=True)
before = len(descendants([os.getpid()]))
end_children()
print(before, len(descendants([os.getpid()])))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert ended.stdout.split() == ["2", "1"]
