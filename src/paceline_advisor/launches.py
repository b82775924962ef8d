"""Runs started as commands, observed and disturbed from outside, including all of their processes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from paceline.distributed.environment import read_launch
from paceline.errors import LaunchError
from paceline.host.processes import ProcessGroup, can_find_descendants, signal_name, without_rank_variables

_POLL_SECONDS = 0.002
_STOP_SECONDS = 120.0
_END_BYTES = 1_000_000


class OverdueError(Exception):
    """A launch missed its time limit; its processes were killed."""


class CommandProcess:
    """``paceline ARGUMENTS`` as a process with all its descendants, whichever parent or session they have (Linux).

    Args:
        arguments: The command line after ``paceline``.
        log: Its output goes into ``<log>.out`` and ``<log>.err``; files, as a killed launch's orphans would keep a
            pipe open.
        limit_seconds: Time limit, after which it is killed.
        variables: Additional environment variables.
        folder: Its working directory; None for this process's.
        program: What to start instead of ``paceline``.

    Raises:
        LaunchError: If it cannot be started.
    """

    def __init__(
        self,
        arguments: list[str],
        log: Path,
        *,
        limit_seconds: float,
        variables: Mapping[str, str] | None = None,
        folder: Path | None = None,
        program: Sequence[str] = (sys.executable, "-P", "-m", "paceline"),
    ) -> None:
        self._deadline = time.monotonic() + limit_seconds
        self._limit = limit_seconds
        self._out, self._err = log.with_name(f"{log.name}.out"), log.with_name(f"{log.name}.err")
        self._group = ProcessGroup()
        # A short name: it contains sockets of loader processes, whose paths are limited to 108 bytes.
        temporary = tempfile.mkdtemp(prefix="t", dir=log.parent)
        self.begun = time.monotonic()
        try:
            child = self._group.start(
                [*program, *arguments],
                env={**without_rank_variables(os.environ), "TMPDIR": temporary, **(variables or {})},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=self._out,
                stderr=self._err,
            )
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise LaunchError(f"a process cannot be started ({error.strerror}).") from error
        self.process = child.process

    @property
    def out(self) -> str:
        """Its standard output so far."""
        return self._out.read_text(encoding="utf-8", errors="replace")

    @property
    def err(self) -> str:
        """Its standard error so far."""
        return self._err.read_text(encoding="utf-8", errors="replace")

    def family(self) -> set[int]:
        """Processes of this launch that are alive."""
        return self._group.members()

    def ranks(self) -> list[int]:
        """Process ids of the ranks, in order; a single process is rank 0."""
        found: dict[int, int] = {}
        for pid in self.family():
            number = _variable(pid, "RANK")
            # A rank's children inherit its number: the rank is the process whose parent does not have it.
            if number is not None and _variable(_parent(pid), "RANK") is None:
                found[int(number)] = pid
        return [found[rank] for rank in sorted(found)] or [self.process.pid]

    def workers(self) -> list[int]:
        """Loader processes: forks of a rank."""
        ranks = self.ranks()
        mine = [pid for pid in self.family() if _parent(pid) in ranks]
        return sorted(pid for pid in mine if _read(pid, "cmdline") == _read(_parent(pid), "cmdline"))

    def send(self, number: signal.Signals, pids: set[int] | list[int]) -> None:
        """Send a signal to processes of this launch; those that have ended are ignored."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """Send SIGKILL to every process, like a power failure."""
        self._group.kill()

    def stop(self) -> None:
        """Request a stop, unless it has ended, and wait for its last checkpoint; kills it if that takes too long."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.wait_alone(_STOP_SECONDS)

    def wait(self) -> int:
        """Wait for its end and return its exit code, negative after a signal.

        Raises:
            OverdueError: If it takes too long.
        """
        if self._group.wait(max(0.0, self._deadline - time.monotonic())).reason:
            raise self._overdue("had not ended")
        return self.process.returncode

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait until a condition holds; returns False if the launch ended first.

        Raises:
            OverdueError: If it takes too long.
        """
        while not condition():
            if self.process.poll() is not None:
                return condition()
            if time.monotonic() > self._deadline:
                raise self._overdue("was not where it should be")
            time.sleep(_POLL_SECONDS)
        return True

    def wait_alone(self, limit_seconds: float) -> int:
        """Wait until none of its processes is left; kills those that stay longer and returns their number."""
        deadline = time.monotonic() + limit_seconds
        while family := self.family():
            if time.monotonic() > deadline:
                self.kill()
                return len(family)
            time.sleep(0.02)
        return 0

    def _overdue(self, outcome: str) -> OverdueError:
        self.kill()
        return OverdueError(f"the run {outcome} after {self._limit:.0f} s, and was killed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def said(launch: CommandProcess) -> str:
    """Return the final message of a launch, in one line."""
    code = launch.process.poll()
    _, has_message, message = f"\n{launch.err.strip()}".partition("\npaceline: ")
    if has_message:
        first, *others = message.splitlines()
        if others and first.endswith(":"):
            # A traceback's cause is in its last line; any other message is a list.
            return others[-1] if "Traceback" in message else " ".join([first, *map(str.strip, others)])
        return first
    if code is not None and code < 0:
        return f"ended by {signal_name(code)}"
    ended = [line for line in launch.out.splitlines() if line.startswith(("Stopped", "Completed"))]
    return ended[-1] if ended else ""


def check_can_watch(study: str) -> None:
    """Check that this process may start launches, and find and end all their processes.

    Args:
        study: The study that starts them, for the message.

    Raises:
        LaunchError: If this system has no ``/proc``, or this process is itself part of a launch.
    """
    if not can_find_descendants():
        raise LaunchError(f"{study} needs /proc to find its processes, which only Linux has; run it there.")
    check_alone(study)


def check_alone(study: str) -> None:
    """Check that this process may start launches.

    Args:
        study: The study that starts them, for the message.

    Raises:
        LaunchError: If this process is itself part of a launch.
    """
    source = read_launch(os.environ).source
    if source != "alone":
        raise LaunchError(
            f"{study} starts its own processes, but was itself started as one of several (by {source}); run "
            "it alone, with --processes N."
        )


def last_step(run_dir: Path) -> int:
    """Return the last recorded step of a run directory, while the run continues; 0 without one."""
    try:
        with (run_dir / "events.jsonl").open("rb") as file:  # of a long run only the end, as this is called often
            begin = max(0, file.seek(0, os.SEEK_END) - _END_BYTES)
            file.seek(begin)
            lines = file.read().split(b"\n")[bool(begin) : -1]
    except FileNotFoundError:
        return 0
    return max((int(json.loads(line)["step"]) for line in lines[-20:]), default=0)


def _variable(pid: int, name: str) -> str | None:
    """Return an environment variable of a process; None if it is unset, or the process is gone."""
    prefix, entries = f"{name}=".encode(), _read(pid, "environ").split(b"\0")
    return next((entry[len(prefix) :].decode() for entry in entries if entry.startswith(prefix)), None)


def _parent(pid: int) -> int:
    found = _read(pid, "stat").rpartition(b")")[2].split()
    return int(found[1]) if found else 0


def _read(pid: int, name: str) -> bytes:
    """Return the system's status of a process; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
