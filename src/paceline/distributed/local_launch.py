"""Launch N ranks on this machine, and report the error that ended them.

The launcher imports no torch. It starts the same command once per rank, forwards signals, and returns one exit code.
Ranks write their errors to files, so that the first one is shown first and duplicates only once.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.distributed.environment import RENDEZVOUS_VARIABLE, RESTARTS_VARIABLE, read_launch
from paceline.errors import (
    DataError,
    LaunchError,
    ModelError,
    OtherProcessError,
    PacelineError,
    RecipeError,
    RunDirectoryError,
    TrainingError,
)
from paceline.host.processes import LOADER_GRACE_SECONDS, Child, ProcessGroup, WaitResult, received_signals
from paceline.host.system import STOP_SIGNALS
from paceline.host.world import COMMAND_VARIABLE
from paceline.parsing.plain_text import one_line, printable
from paceline.storage.addresses import redact_secrets

# Errors that every process finds alike in the user's input. Others may be temporary: a late peer, a directory in use.
_MISTAKES = (RecipeError, DataError, ModelError)
_TORCHRUN = ("torch.distributed.run", "torchrun")
STOPPED_EXIT_CODE = 75
_ERROR_DIRECTORY = "PACELINE_ERROR_DIRECTORY"
LAUNCHER_VARIABLE = "PACELINE_LAUNCHER_PID"
# A failed rank's peers usually notice the broken connection; those that do not are ended after this many seconds.
_GRACE_AFTER_FAILURE_SECONDS = 10.0
# Ranks end together: a rank that stays this long after another has completed waits for something that will not come.
# The others wait for anything that only the first rank still does, so this need not be as long as an evaluation or a
# save.
_GRACE_AFTER_END_SECONDS = 60.0
# A rank whose launcher is gone stops after its step; this leaves time for an evaluation and a save in progress.
_GRACE_WITHOUT_LAUNCHER_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """The allowed restarts.

    Attributes:
        limit: How often the ranks may be started again.
        sizes: The numbers of ranks that may be started, the largest first.
        run_dir: The run directory, whose records show the progress.
        arguments: The arguments of restarted ranks.
    """

    limit: int
    sizes: tuple[int, ...]
    run_dir: Path
    arguments: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How a launch that may be restarted ended.

    Attributes:
        size: Its number of ranks.
        step: The last recorded step of the run at that time; -1 without one.
        cause: The reason, in a few words.
    """

    size: int
    step: int
    cause: str


def next_size(sizes: Sequence[int], failures: Sequence[Failure]) -> int | None:
    """Return how many ranks to start after these failures; None if the last failure only repeats.

    After a failure with the most ranks, fewer continue, since some may have lost their host; after a failure with
    fewer, the full number is tried again. Without progress in between, the number decreases further, until the same
    failure ends the run.

    Args:
        sizes: The numbers of ranks that may be started, the largest first.
        failures: The failures so far, the latest last.
    """
    last = failures[-1]
    previous = failures[-2] if len(failures) > 1 else None
    progressed = previous is None or last.step > previous.step
    fewer = [size for size in sizes if size < last.size]
    if fewer and (last.size == sizes[0] or not progressed):
        return fewer[0]
    if previous is not None and not progressed and last.cause == previous.cause:
        return None
    return sizes[0]


def last_step(run_dir: Path) -> int:
    """Return the last recorded step of a run; -1 if it has none that can be read."""
    # Imported here, so that a launch without restarts does not load the records library.
    from paceline.records.reader import read_events
    from paceline.records.run_directory import RunDirectory

    path = RunDirectory(run_dir).events
    try:
        return max((event["step"] for event in read_events(path)), default=-1) if path.is_file() else -1
    except RunDirectoryError:
        return -1  # the next start reports what is wrong with them


def is_permanent_error(error: BaseException) -> bool:
    """Whether an error is a user's mistake that the next start would repeat."""
    return isinstance(error, _MISTAKES)


def end_torchrun(environ: Mapping[str, str]) -> None:
    """After a user's mistake at the first start, make torchrun end if it would restart this process.

    torchrun has no exit code for that: it would repeat the mistake for each allowed restart. Later errors may be
    temporary, and are left to torchrun.
    """
    first = environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    # Only one of a host's processes signals torchrun, since a second signal would break its cleanup.
    if first and environ.get("LOCAL_RANK") == "0" and is_torchrun(os.getppid()):
        sys.stderr.flush()
        os.kill(os.getppid(), signal.SIGTERM)


def is_torchrun(pid: int) -> bool:
    """Whether a process is torchrun."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    # `python -m torch.distributed.run …`, or the interpreter and the path of the command `torchrun`.
    return any(Path(word).name in _TORCHRUN for word in arguments[:6])


@dataclass(frozen=True)
class RankError:
    """A rank's last report.

    Attributes:
        summary: Its error in one line, identical if it repeats.
        notes: Its position at that time, and the state of other ranks that it knew.
        is_echo: Whether it only reports that another rank has failed.
    """

    rank: int
    time: float
    message: str
    summary: str
    notes: list[str]
    exit_code: int
    is_traceback: bool
    is_echo: bool


def launch_local(arguments: Sequence[str], processes: int, *, cores: int, restarts: Restarts | None = None) -> int:
    """Run ``paceline ARGUMENTS`` in ``processes`` ranks and return the exit code of the launch.

    Args:
        arguments: Command-line arguments without ``--processes``.
        processes: Number of ranks, at least 1.
        cores: CPU cores to share among them.
        restarts: Whether and how the ranks are restarted if one dies.
    """
    # Signals are stored before there is anything to clean up, and forwarded once the ranks run.
    with received_signals(STOP_SIGNALS) as received:
        outcome = _launch_once(arguments, processes, cores, 0, received)
        if restarts is None:
            return outcome.code
        failures: list[Failure] = []
        # If a stop was requested, do not restart.
        while outcome.cause is not None and not received:
            failures.append(Failure(size=processes, step=last_step(restarts.run_dir), cause=outcome.cause))
            size = next_size(restarts.sizes, failures)
            if not _announce_restart(failures, restarts, size) or size is None:
                break
            processes = size
            outcome = _launch_once(restarts.arguments, processes, cores, len(failures), received)
        return outcome.code


def _announce_restart(failures: Sequence[Failure], restarts: Restarts, size: int | None) -> bool:
    """Report what follows the last failure; returns whether to restart."""
    step, count = failures[-1].step, len(failures)
    where = f"after step {step}" if step >= 0 else "before its first record"
    if size is None:
        message = f"the run has failed again {where} without progress since, and is not restarted"
    elif count > restarts.limit:
        message = f"the run has failed {where}, and has no restarts left (--max-restarts {restarts.limit})"
    else:
        ranks = f"{size} rank{'s' * (size > 1)}"
        message = f"the run has failed {where}; restart {count} of {restarts.limit}, with {ranks}"
    print(f"paceline: {message}", file=sys.stderr, flush=True)
    return size is not None and count <= restarts.limit


def _launch_once(arguments: Sequence[str], processes: int, cores: int, restart: int, received: list[int]) -> _Outcome:
    with tempfile.TemporaryDirectory(prefix="paceline-launch-") as name:
        scratch = Path(name)
        with ProcessGroup(
            success_codes=(0, STOPPED_EXIT_CODE), signals=received, grace_seconds=LOADER_GRACE_SECONDS
        ) as group:
            for rank in range(processes):
                environment = {
                    **os.environ,
                    RESTARTS_VARIABLE: str(restart),
                    **rank_variables(rank, processes, scratch, cores=cores),
                    _ERROR_DIRECTORY: str(scratch),
                    LAUNCHER_VARIABLE: str(os.getpid()),
                    COMMAND_VARIABLE: os.environ.get(COMMAND_VARIABLE) or shlex.join(sys.argv),
                }
                group.start([sys.executable, "-P", "-m", "paceline", *arguments], env=environment, name=f"rank {rank}")
            ending = group.wait(
                after_failure=_GRACE_AFTER_FAILURE_SECONDS,
                after_end=_GRACE_AFTER_END_SECONDS,
                # A rank that has written its error may still wait for the others before it ends.
                failed=lambda: any(scratch.glob("rank-*.json")),
            )
        return _conclude(group.children, ending, read_errors(scratch), asked_to_stop=bool(received))


@dataclass(frozen=True)
class _Outcome:
    """How the ranks ended.

    Attributes:
        code: The exit code of the launch.
        cause: The failure, in a few words, if a restart may succeed; otherwise None, also for a user's mistake.
    """

    code: int
    cause: str | None = None


def rank_variables(rank: int, processes: int, scratch: Path, *, cores: int) -> dict[str, str]:
    """Return environment variables that give a process on this machine its rank and rendezvous.

    Args:
        rank: Its rank.
        processes: Number of processes.
        scratch: Folder for the rendezvous file.
        cores: CPU cores to share among them.
    """
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        # A file needs no free port, so two launches on one machine never collide.
        RENDEZVOUS_VARIABLE: f"file://{scratch}/rendezvous",
    }
    if "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = str(max(1, cores // processes))
    # The loopback interface: on Linux, or on macOS.
    loopback = {"lo", "lo0"}.intersection(name for _, name in socket.if_nameindex())
    if loopback and "GLOO_SOCKET_IFNAME" not in os.environ:
        # All ranks are here; the machine's host name may resolve to an unreachable address.
        variables["GLOO_SOCKET_IFNAME"] = min(loopback)
    return variables


def _conclude(ranks: list[Child], ending: WaitResult, errors: list[RankError], *, asked_to_stop: bool) -> _Outcome:
    """Report what went wrong, the cause first."""
    codes = [child.code or 0 for child in ranks]
    overdue = ending.killed if ending.reason == "end" else ()
    for rank in (number for number, child in enumerate(ranks) if child in overdue):
        print(
            f"paceline: rank {rank} was still running {_GRACE_AFTER_END_SECONDS:.0f} s after another had ended, and "
            "was ended",
            file=sys.stderr,
        )
    if all(code in (0, STOPPED_EXIT_CODE) for code in codes) and not errors:
        return _Outcome(max(codes))
    reported = {f"rank {error.rank}" for error in errors}
    silent = [child for child in ending.failed if child.name not in reported]
    causes = [f"{child.name} {child.exit_message}" for child in silent]
    for cause in causes:
        print(f"paceline: {cause}", file=sys.stderr)
    causes += [f"{child.name} did not end" for child in overdue]
    # A rank that refuses its command line reports that itself, and would do so again.
    mistake = any(child.code == PacelineError.exit_code for child in silent)
    if not errors:
        return _Outcome(1, causes[0] if causes and not mistake else None)
    first, *others = errors
    # A rank that died without a report is the cause; the others only report that it is missing. So do those that were
    # about to join when others were stopped.
    is_echo = bool(silent) or (asked_to_stop and first.is_traceback)
    if is_echo:
        others = errors
    else:
        label = f"rank {first.rank} failed first:\n" if first.is_traceback else ""
        print(f"paceline: {label}{first.message}", file=sys.stderr)
    # Each rank also lists what it knew of the others: the longest of these lists is enough.
    longest = max(others, key=lambda error: sum(note.count("\n(rank ") for note in error.notes), default=None)
    for error in others:
        if error.message != first.message or is_echo:
            notes = error.notes if error is longest else [re.sub(r"\n\(rank .*", "", note) for note in error.notes]
            print("\n".join([f"paceline: rank {error.rank} then: {error.summary}", *notes]), file=sys.stderr)
    if silent:
        return _Outcome(1, None if mistake else causes[0])
    return _Outcome(first.exit_code, first.summary if first.exit_code == 1 else None)


def read_errors(directory: Path) -> list[RankError]:
    """Return the errors of ranks: the earliest first, then those that only report another rank's."""
    errors = [RankError(**json.loads(path.read_text())) for path in directory.glob("rank-*.json")]
    return sorted(errors, key=lambda error: (error.is_echo, error.time))


def report_error(error: BaseException, environ: Mapping[str, str]) -> int:
    """Report to the launcher, or to standard error, why this process ends; returns the exit code.

    A user's mistake is reported in one sentence; anything else as a traceback.
    """
    rank, world_size = 0, 1
    with contextlib.suppress(LaunchError):  # invalid variables that describe the world may be the very error
        world = read_launch(environ).world
        rank, world_size = world.rank, world.world_size
    mistake = isinstance(error, PacelineError)
    code = error.exit_code if isinstance(error, PacelineError) else 1
    notes = [_sanitized(str(note)) for note in getattr(error, "__notes__", ())]
    message = "\n".join([*_lines(error), *notes]) if mistake else _sanitized("".join(traceback.format_exception(error)))
    if not mistake and not (notes or "(")[0].startswith("("):  # what failed, before where
        message = f"{' '.join(notes)}\n{message}"
    directory = environ.get(_ERROR_DIRECTORY)
    if directory is not None:
        first_line = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        record = {
            "rank": rank,
            "time": time.time(),
            "message": message,
            # Without notes, which describe the moment more than the error.
            "summary": _lines(error)[-1] if mistake else _sanitized(first_line),
            "notes": notes,
            "exit_code": code,
            "is_traceback": not mistake,
            "is_echo": isinstance(error, OtherProcessError),
        }
        with contextlib.suppress(OSError):  # the launcher has removed it, or its disk is full
            partial = Path(directory) / f".rank-{rank}"
            partial.write_text(json.dumps(record))
            partial.rename(Path(directory) / f"rank-{rank}.json")
            return code
    prefix = f"rank {rank}: " if world_size > 1 else ""
    print(f"paceline: {prefix}{message}", file=sys.stderr)
    return code


def _sanitized(text: str) -> str:
    """Return the text of an error: addresses may contain credentials, and file names anything."""
    return printable(redact_secrets(text))


def _lines(error: BaseException) -> list[str]:
    """Return a message's lines. A newline in a file name is shown escaped; a training failure may quote many lines."""
    if isinstance(error, TrainingError):
        return _sanitized(str(error)).strip().splitlines() or [""]
    return [one_line(redact_secrets(str(line))) for line in error.args] or [""]


def follow_launcher(environ: Mapping[str, str], *, grace_seconds: float = _GRACE_WITHOUT_LAUNCHER_SECONDS) -> None:
    """In a rank: ask this process to stop if its launcher or torchrun dies, so that no orphan trains on.

    Args:
        environ: The environment, with the process id set by Paceline's launcher or torchrun's run id.
        grace_seconds: The process is killed if it is still running after this time: it may wait for a rank that is
            gone.
    """
    launcher = int(environ.get(LAUNCHER_VARIABLE, 0))
    if not launcher and "TORCHELASTIC_RUN_ID" in environ and is_torchrun(os.getppid()):
        launcher = os.getppid()
    if not launcher:
        return

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_seconds)
        os._exit(1)  # safe at any moment: a checkpoint is complete or invisible

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()
