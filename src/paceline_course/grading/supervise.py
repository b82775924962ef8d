"""Enforce the limits of a graded run: detect a hang, and end the run with all its processes."""

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
# A run is idle if it used at most this share of the time, and had a thread ready to run in at most this share of the
# samples. On a busy machine, working processes are ready in nearly every sample.
_IDLE_SHARE = 0.02
_READY_SHARE = 0.25
_TO_END_SECONDS = 10.0  # for killed processes to get processor time to end
_PR_SET_CHILD_SUBREAPER = 36  # of Linux's prctl.h


@dataclass(frozen=True)
class ResourceLimits:
    """Resource limits of one run.

    Attributes:
        processor_seconds: CPU time of all its processes; a right answer takes a second or two.
        idle_seconds: Time without any work in all its processes after which the run counts as hung. Waiting for a busy
            processor does not count as idle.
        seconds: Wall-clock time, for cases that the other limits miss.
        processes: Number of processes at the same time.
        memory_bytes: Address space of each process, in addition to what torch uses.
        file_bytes: Size of the largest file.
        poll_seconds: Time between two checks of these limits.
    """

    processor_seconds: float = 20
    idle_seconds: float = 5
    seconds: float = 240
    processes: int = 32
    memory_bytes: int = 4 << 30
    file_bytes: int = 64 << 20
    poll_seconds: float = 0.25


class Supervisor:
    """Monitors the processes of one run and their children."""

    def __init__(self, limits: ResourceLimits) -> None:
        self.limits = limits
        self._begin = self._polled = time.monotonic()
        self._samples: deque[_UsageSample] = deque()

    def violation(self, pids: Iterable[int]) -> str:
        """Return why the processes must be ended, such as ``hang``; empty if they may continue."""
        now = time.monotonic()
        if now - self._polled < self.limits.poll_seconds:
            return ""
        self._polled = now
        family = descendants(pids)
        uses = [use for use in map(_use, family) if use is not None]
        seconds = sum(use.ticks for use in uses) * _TICK
        if seconds > self.limits.processor_seconds:
            return "processor time"
        if len(family) > self.limits.processes:
            return "processes"
        if self._is_idle(_UsageSample(now, seconds, any(use.is_ready for use in uses))):
            return "hang"
        return "time" if now - self._begin > self.limits.seconds else ""

    def _is_idle(self, sample: _UsageSample) -> bool:
        """Return whether the processes have done almost nothing for ``idle_seconds``.

        Watchdog threads wake briefly now and then, and a sample may catch one awake. Therefore the CPU time used and
        the share of samples with a ready thread decide, not a single sample.
        """
        if not _PROC.is_dir():
            return False
        samples = self._samples
        if samples and sample.processor_seconds < samples[-1].processor_seconds:
            samples.clear()  # a process has ended
        samples.append(sample)
        while len(samples) > 1 and sample.at - samples[1].at >= self.limits.idle_seconds:
            samples.popleft()
        span = sample.at - samples[0].at
        if span < self.limits.idle_seconds:
            return False
        used = sample.processor_seconds - samples[0].processor_seconds
        ready = sum(each.is_ready for each in samples) / len(samples)
        return used <= _IDLE_SHARE * span and ready <= _READY_SHARE


def descendants(pids: Iterable[int]) -> list[int]:
    """Return the processes and all their descendants."""
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
    """Kill the process group of a process."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of processes that a rank leaves behind, so that they can be found (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_children() -> None:
    """End all descendants of this process, and reap its children."""
    deadline = time.monotonic() + _TO_END_SECONDS
    while time.monotonic() < deadline:  # children of ended processes are adopted and found in the next round
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
class _UsageSample:
    at: float
    processor_seconds: float
    is_ready: bool


@dataclass(frozen=True)
class _Usage:
    ticks: int
    is_ready: bool


def _use(pid: int) -> _Usage | None:
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        states = [stat.read_text().rpartition(")")[2].split()[0] for stat in _PROC.glob(f"{pid}/task/*/stat")]
    except OSError:
        return None
    # `fields` begins with the third field of stat; user and system time are the 14th and 15th.
    return _Usage(int(fields[11]) + int(fields[12]), any(state in "RD" for state in states))
