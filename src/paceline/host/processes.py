"""Child processes: start them, wait for them, and kill them with all their descendants.

Only a child itself receives stop requests: its loader processes must live until its checkpoint is written. SIGKILL is
sent to all of its descendants.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Self

# Lists the groups that a process descends from. It identifies the process whatever its current parent or session
# (Linux).
_VARIABLE = "PACELINE_PROCESS_GROUPS"
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# For a program with loader processes: they notice within half a second that it is gone, and then remove its files.
LOADER_GRACE_SECONDS = 3.0
_POLL_SECONDS = 0.05
_KILL_POLL_SECONDS = 0.005
# SIGKILL ends a process as soon as it returns from the kernel; one that waits for a device or a server may never
# return.
_KILL_SECONDS = 20.0


def signal_name(code: int) -> str:
    """Return the name of the signal of a negative exit code; most real-time signals have only a number."""
    return signal.Signals(-code).name if -code in [*signal.Signals] else f"signal {-code}"


@dataclass(eq=False)
class Child:
    """A process that a group has started.

    Attributes:
        name: Its name in messages.
        process: The process; its own methods may be used too.
        errors: The file that holds its standard error; None if it has none.
    """

    name: str
    process: subprocess.Popen[bytes]
    errors: Path | None = None

    @property
    def code(self) -> int | None:
        """Its exit code, negative after a signal; None while it runs."""
        return self.process.poll()

    @property
    def exit_message(self) -> str:
        """Describe how it ended, in one line: a signal, the last line it wrote, or an exit code."""
        code = self.process.poll()
        if code is None:
            return "is still running"
        if code < 0:
            hint = " (the system may have been out of memory)" if code == -signal.SIGKILL else ""
            return f"was ended by {signal_name(code)}{hint}"
        lines = self.errors.read_text(encoding="utf-8", errors="replace").strip().splitlines() if self.errors else []
        return lines[-1] if lines else f"ended with exit code {code} and no message"


@dataclass(frozen=True)
class WaitResult:
    """Why a wait ended.

    Attributes:
        failed: Children that failed by themselves, in the order in which they ended.
        killed: Children that were still running, and were killed.
        reason: Why these were killed: another child failed or had succeeded too long before, the timeout expired, or
            the wait was cancelled. Empty if all ended by themselves.
    """

    failed: tuple[Child, ...] = ()
    killed: tuple[Child, ...] = ()
    reason: Literal["", "failure", "end", "time", "cancelled"] = ""


@dataclass
class ProcessGroup:
    """Child processes that end together. Leaving the ``with`` block kills the remaining ones, and their descendants.

    If all succeeded, a descendant in a separate session is spared: a program may detach an upload on purpose.

    Each child has its own session, so that signals from a terminal reach it only through this process. Descendants that
    have changed their parent or session are found on Linux; elsewhere only those in a child's process group.

    Attributes:
        success_codes: Exit codes that do not count as failures.
        signals: Signals to send to each child while :meth:`wait` waits, see :func:`received_signals`.
        grace_seconds: Seconds that descendants have to end by themselves once their child is gone (Linux).
        children: The processes started so far.
    """

    success_codes: tuple[int, ...] = (0,)
    signals: Sequence[int] = ()
    grace_seconds: float = 0.0
    children: list[Child] = field(default_factory=list)
    _mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    _signals_sent: int = 0

    def start(
        self, argv: Sequence[str], *, name: str = "", env: Mapping[str, str] | None = None, **options: Any
    ) -> Child:
        """Start a child.

        Args:
            argv: Program and arguments.
            name: Its name in messages.
            env: Its environment, this process's by default.
            **options: As ``subprocess.Popen`` takes them; a path as ``stdout`` or ``stderr`` is a file to write.

        Raises:
            OSError: If it cannot be started.
        """
        groups = ",".join(filter(None, (os.environ.get(_VARIABLE), self._mark)))
        environment = {**(os.environ if env is None else env), _VARIABLE: groups}
        paths = {stream: path for stream, path in options.items() if isinstance(path, Path) and stream != "cwd"}
        with ExitStack() as files:
            opened = {path: files.enter_context(path.open("wb")) for path in paths.values()}
            streams = {stream: opened[path] for stream, path in paths.items()}
            process = subprocess.Popen(argv, env=environment, start_new_session=True, **{**options, **streams})
        self.children.append(Child(name, process, paths.get("stderr")))
        return self.children[-1]

    def wait(
        self,
        timeout: float = math.inf,
        *,
        after_failure: float = 0.0,
        after_end: float = math.inf,
        failed: Callable[[], bool] = lambda: False,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> WaitResult:
        """Wait until every child has ended; the first failure ends all children.

        Args:
            timeout: Seconds until all are killed.
            after_failure: Seconds given to the others after the first failure.
            after_end: Seconds given to the others after the first child ended, whether or not it succeeded.
            failed: Whether a running child is known to have failed.
            cancelled: Whether to kill all children now.
        """
        deadline = time.monotonic() + timeout
        failure_at = end_at = math.inf
        failures: list[Child] = []
        while True:
            running = [child for child in self.children if child.code is None]
            ended = [child for child in self.children if child.process.returncode is not None]
            failures += [
                child for child in ended if child.process.returncode not in self.success_codes and child not in failures
            ]
            if not running:
                return WaitResult(tuple(failures))
            now = time.monotonic()
            if failures or failed():
                failure_at = min(failure_at, now)
            if ended:
                end_at = min(end_at, now)
            reasons: dict[Literal["failure", "end", "time", "cancelled"], bool] = {
                "failure": now - failure_at > after_failure,
                "end": now - end_at > after_end,
                "time": now > deadline,
                "cancelled": cancelled(),
            }
            for reason, applies in reasons.items():
                if applies:
                    self.kill()
                    return WaitResult(tuple(failures), tuple(running), reason)
            if self._signals_sent < len(self.signals):  # one at a time: two of a kind at once arrive as one
                self.send(self.signals[self._signals_sent])
                self._signals_sent += 1
            time.sleep(_POLL_SECONDS)

    def send(self, number: int) -> None:
        """Send a signal to each running child, but not to its descendants."""
        for child in self.children:
            if child.code is None:
                child.process.send_signal(number)

    def members(self) -> set[int]:
        """Return the ids of all living processes of this group: children and their descendants (Linux)."""
        return set(_marked_processes(self._mark))

    def kill(self, *, detached: bool = True) -> None:
        """Kill and reap every child, and kill its descendants; with ``detached``, those in other sessions too.

        A process that does not end within 20 seconds of being killed is named on standard error and left running.
        """
        by_group = not can_find_descendants() or not self.grace_seconds
        for child in self.children:
            # The id of a reaped child may now belong to another process; its descendants are found below.
            if hasattr(os, "killpg") and by_group and (child.code is None or not can_find_descendants()):
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.process.pid, signal.SIGKILL)
            child.process.kill()
        killed = time.monotonic()
        for child in self.children:
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, killed + _KILL_SECONDS - time.monotonic()))
        remaining = {child.process.pid for child in self.children if child.code is None}
        deadline = time.monotonic() + self.grace_seconds
        # A process that is being forked meanwhile is found by the next scan.
        while members := {pid for pid in self.members() if detached or not self._is_detached(pid)}:
            if time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                continue
            if time.monotonic() > deadline + _KILL_SECONDS or members <= remaining:
                remaining |= members
                break
            for pid in members:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_KILL_POLL_SECONDS)
        if remaining:
            ids = ", ".join(map(str, sorted(remaining)))
            sys.stderr.write(
                f"paceline: cannot kill process {ids}, which is blocked in the kernel; it is left running.\n"
            )

    def _is_detached(self, pid: int) -> bool:
        try:
            return os.getsid(pid) not in {child.process.pid for child in self.children}
        except ProcessLookupError:
            return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(detached=any(child.code not in self.success_codes for child in self.children))


@contextmanager
def received_signals(numbers: Iterable[signal.Signals]) -> Iterator[list[int]]:
    """Collect signals to forward to children, instead of handling them here."""
    received: list[int] = []

    def receive(number: int, _: FrameType | None) -> None:
        received.append(number)

    previous = {number: signal.signal(number, receive) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def without_rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that assign a process its rank and world."""
    return {name: value for name, value in environ.items() if name not in _RANK_VARIABLES}


def can_find_descendants() -> bool:
    """Whether descendants that have changed their parent or session can be found."""
    return sys.platform == "linux" and Path("/proc/self/environ").exists()


def _marked_processes(mark: str) -> Iterator[int]:
    if not can_find_descendants():
        return
    prefix, needle = f"{_VARIABLE}=".encode(), mark.encode()
    for entry in Path("/proc").iterdir():
        # The environment of a process just forked, or ended, is empty or gone; another user's cannot be read.
        with suppress(OSError):
            variables = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if any(each.startswith(prefix) and needle in each for each in variables):
                yield int(entry.name)
