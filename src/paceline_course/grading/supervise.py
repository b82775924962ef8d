"""Limits of a graded run: detect a hang, and end the run with everything that it started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TICK = 1 / os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")
# Of the time, for what counts as idle: on a busy machine those at work are ready for their turn at nearly every look.
_IDLE_SHARE = 0.02
_READY_SHARE = 0.25
_TO_END_SECONDS = 10.0  # of what is killed, until it has had the processor to end on
_PR_SET_CHILD_SUBREAPER = 36  # of Linux's prctl.h


@dataclass(frozen=True)
class Limits:
    """What one run may use.

    Attributes:
        processor_seconds: Of all its processes together; a right answer takes a second or two.
        idle_seconds: For so long none of its processes does anything before it counts as hung. Waiting for a turn on a
            busy processor is not idle.
        seconds: Of wall-clock time, for whatever the others do not see.
        processes: At once.
        memory_bytes: Of address space for each process, besides what torch takes.
        file_bytes: The largest file.
        look_seconds: Between two looks at all this.
    """

    processor_seconds: float = 20
    idle_seconds: float = 5
    seconds: float = 240
    processes: int = 32
    memory_bytes: int = 4 << 30
    file_bytes: int = 64 << 20
    look_seconds: float = 0.25


class Supervisor:
    """Watches some processes and their children for one run."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._begin = self._looked = time.monotonic()
        self._looks: deque[_Look] = deque()

    def objection(self, pids: Iterable[int]) -> str:
        """Return why the processes have to be ended now, such as ``hang``; empty if they may go on."""
        now = time.monotonic()
        if now - self._looked < self.limits.look_seconds:
            return ""
        self._looked = now
        family = descendants(pids)
        uses = [use for use in map(_use, family) if use is not None]
        seconds = sum(use.ticks for use in uses) * _TICK
        if seconds > self.limits.processor_seconds:
            return "processor time"
        if len(family) > self.limits.processes:
            return "processes"
        if self._is_idle(_Look(now, seconds, any(use.is_ready for use in uses))):
            return "hang"
        return "time" if now - self._begin > self.limits.seconds else ""

    def _is_idle(self, look: _Look) -> bool:
        """Return whether next to nothing has been done for as long as that may be.

        Threads that watch over others wake now and then, for a moment each, and may be seen awake: so what counts is
        how much was done, and how often somebody was at work.
        """
        if not _PROC.is_dir():
            return False
        looks = self._looks
        if looks and look.processor_seconds < looks[-1].processor_seconds:
            looks.clear()  # one of them has ended
        looks.append(look)
        while len(looks) > 1 and look.at - looks[1].at >= self.limits.idle_seconds:
            looks.popleft()
        span = look.at - looks[0].at
        if span < self.limits.idle_seconds:
            return False
        used = look.processor_seconds - looks[0].processor_seconds
        ready = sum(each.is_ready for each in looks) / len(looks)
        return used <= _IDLE_SHARE * span and ready <= _READY_SHARE


def descendants(pids: Iterable[int]) -> list[int]:
    """Return some processes and all that descend from them."""
    found: list[int] = []
    left = list(pids)
    while left:
        pid = left.pop()
        found.append(pid)
        for children in _PROC.glob(f"{pid}/task/*/children"):
            with contextlib.suppress(OSError):
                left += [int(child) for child in children.read_text().split()]
    return found


def end_group(pid: int) -> None:
    """Kill a process with its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of whatever a rank leaves behind, so that it is found without its environment (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_children() -> None:
    """End all descendants of this process, and reap those that are its children."""
    deadline = time.monotonic() + _TO_END_SECONDS
    while time.monotonic() < deadline:  # the children of one that is ended are adopted, and found at the next look
        left = [pid for pid in descendants([os.getpid()]) if pid != os.getpid()]
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not left:
            return
        time.sleep(0.02)


@dataclass(frozen=True)
class _Look:
    at: float
    processor_seconds: float
    is_ready: bool


@dataclass(frozen=True)
class _Use:
    ticks: int
    is_ready: bool


def _use(pid: int) -> _Use | None:
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        states = [stat.read_text().rpartition(")")[2].split()[0] for stat in _PROC.glob(f"{pid}/task/*/stat")]
    except OSError:
        return None
    # Since the field after the name, which is the third: user and system time are the 14th and 15th.
    return _Use(int(fields[11]) + int(fields[12]), any(state in "RD" for state in states))
