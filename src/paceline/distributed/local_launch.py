"""How are N processes started on this machine, and what happens when one of them fails or is told to stop?

The launcher imports no torch. It starts the same command once per rank, passes signals on, and returns one
exit code. Ranks write their errors to files, so that the first one is shown first and equal ones once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from paceline.distributed.environment import RENDEZVOUS_VARIABLE
from paceline.errors import PacelineError

STOPPED_EXIT_CODE = 75
_ERROR_DIRECTORY = "PACELINE_ERROR_DIRECTORY"
_LAUNCHER_PID = "PACELINE_LAUNCHER_PID"
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
# A failed rank's peers notice the broken connection by themselves; those that do not are ended after this.
_GRACE_SECONDS = 10.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class RankError:
    """What a rank had to say before it ended."""

    rank: int
    time: float
    message: str
    exit_code: int
    is_traceback: bool


def launch_local(arguments: Sequence[str], processes: int, *, cores: int) -> int:
    """Run ``paceline ARGUMENTS`` in ``processes`` ranks and return the exit code of the whole.

    Args:
        arguments: Command-line arguments without ``--processes``.
        processes: Number of ranks, at least 2.
        cores: CPU cores to share among them.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-launch-") as scratch:
        ranks = [_start(arguments, rank, processes, Path(scratch), cores) for rank in range(processes)]
        try:
            died = _supervise(ranks, Path(scratch))
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()
        return _conclude([process.returncode for process in ranks], died, read_errors(Path(scratch)))


def _start(arguments: Sequence[str], rank: int, processes: int, scratch: Path, cores: int) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        # A file needs no free port, so two launches on one machine never collide.
        RENDEZVOUS_VARIABLE: f"file://{scratch}/rendezvous",
        _ERROR_DIRECTORY: str(scratch),
        _LAUNCHER_PID: str(os.getpid()),
    }
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
    # A session of its own: a signal to the terminal's group reaches a rank once, through the launcher.
    return subprocess.Popen([sys.executable, "-m", "paceline", *arguments], env=environment, start_new_session=True)


def _supervise(ranks: list[subprocess.Popen[bytes]], scratch: Path) -> list[int]:
    """Wait for all ranks; returns those that failed by themselves, in the order in which they ended."""
    received: list[int] = []
    died: list[int] = []

    def remember(number: int, _: FrameType | None) -> None:
        received.append(number)

    previous = {number: signal.signal(number, remember) for number in _FORWARDED}
    failed_at: float | None = None
    try:
        while True:
            codes = [process.poll() for process in ranks]
            died += [r for r, code in enumerate(codes) if code not in (None, 0, STOPPED_EXIT_CODE) and r not in died]
            if None not in codes:
                return died
            # A rank that has left its error may yet wait for the others before it ends.
            if failed_at is None and (died or any(scratch.glob("rank-*.json"))):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > _GRACE_SECONDS:
                _signal_all(ranks, signal.SIGKILL)
                return died
            while received:
                _signal_all(ranks, received.pop(0))
            time.sleep(_POLL_SECONDS)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _signal_all(ranks: list[subprocess.Popen[bytes]], number: int) -> None:
    for process in ranks:
        if process.poll() is None:
            process.send_signal(number)


def _conclude(codes: list[int], died: list[int], errors: list[RankError]) -> int:
    """Say what went wrong, its cause first, and return the exit code of the whole."""
    if all(code in (0, STOPPED_EXIT_CODE) for code in codes):
        return max(codes)
    spoke = {error.rank for error in errors}
    silent = [rank for rank in died if rank not in spoke]
    for rank in silent:
        print(f"paceline: rank {rank} {_ending_of(codes[rank])}", file=sys.stderr)
    if not errors:
        return 1
    first, *others = errors
    if silent:
        # A rank that died without a word is the cause; what the others say is that they miss it.
        others = errors
    else:
        label = f"rank {first.rank} failed first:\n" if first.is_traceback else ""
        print(f"paceline: {label}{first.message}", file=sys.stderr)
    for error in others:
        if error.message != first.message or silent:
            print(f"paceline: rank {error.rank} then: {error.message.strip().splitlines()[-1]}", file=sys.stderr)
    return 1 if silent else first.exit_code


def _ending_of(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code} and left no message"
    hint = " (the system may have been out of memory)" if code == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{hint}"


def read_errors(directory: Path) -> list[RankError]:
    """Errors left by ranks, the earliest first."""
    errors = [RankError(**json.loads(path.read_text())) for path in directory.glob("rank-*.json")]
    return sorted(errors, key=lambda error: error.time)


def report_error(error: BaseException, environ: Mapping[str, str]) -> int:
    """Tell the launcher, or standard error if there is none, why this process ends; returns the exit code.

    A mistake of the user's is one sentence; anything else is a traceback.
    """
    rank = int(environ.get("RANK", "0"))
    mistake = isinstance(error, PacelineError)
    code = error.exit_code if isinstance(error, PacelineError) else 1
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    message = f"{error}{notes}" if mistake else "".join(traceback.format_exception(error))
    directory = environ.get(_ERROR_DIRECTORY)
    if directory is None or not Path(directory).is_dir():
        prefix = f"rank {rank}: " if "WORLD_SIZE" in environ and environ["WORLD_SIZE"] != "1" else ""
        print(f"paceline: {prefix}{message}", file=sys.stderr)
        return code
    record = {
        "rank": rank,
        "time": time.time(),
        "message": message,
        "exit_code": code,
        "is_traceback": not mistake,
    }
    partial = Path(directory) / f".rank-{rank}"
    partial.write_text(json.dumps(record))
    partial.rename(Path(directory) / f"rank-{rank}.json")
    return code


def follow_launcher(environ: Mapping[str, str]) -> None:
    """In a rank: ask this process to stop if its launcher dies, so that no orphan trains on."""
    launcher = environ.get(_LAUNCHER_PID)
    if launcher is None:
        return

    def watch() -> None:
        while os.getppid() == int(launcher):
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()
