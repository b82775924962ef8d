"""Start many short runs quickly: one process imports torch once and forks each rank.

``python -m paceline_course.grading.host`` reads each :class:`ProgramLaunch` as a line of JSON. It starts the ranks with
the environment that torchrun would set, supervises them, and answers with an :class:`Outcome`. It computes nothing
itself, so it has no threads when it forks.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import random
import resource
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from paceline_course.grading.recorder import RankRecorder, RecordingOptions
from paceline_course.grading.supervise import ResourceLimits, Supervisor, adopt_orphans, end_children, end_group

_POLL_SECONDS = 0.05
# Idle time allowed to the other ranks after one has failed.
_GRACE_SECONDS = 1.0


@dataclass(frozen=True)
class ProgramLaunch:
    """One run of a program.

    Attributes:
        program: The program's file.
        arguments: Command-line arguments.
        processes: World size.
        directory: Working directory; also the home and temporary directory.
        watch: What to record and when to kill.
        limits: Resource limits.
    """

    program: str
    arguments: tuple[str, ...]
    processes: int
    directory: str
    watch: RecordingOptions
    limits: ResourceLimits


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        exit_codes: Exit code of each rank; negative after a signal.
        ended_for: Limit for which it was ended (``hang``, ``processor time``, ``processes``, ``time``); empty if it
            ended by itself.
    """

    exit_codes: tuple[int, ...]
    ended_for: str = ""


def main() -> None:
    """Serve launches until standard input ends."""
    _preload()
    adopt_orphans()
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        values = json.loads(line)
        watch, limits = RecordingOptions(**values.pop("watch")), ResourceLimits(**values.pop("limits"))
        outcome = run(ProgramLaunch(**values, watch=watch, limits=limits))
        answers.write(json.dumps(asdict(outcome)) + "\n")
        answers.flush()


def run(launch: ProgramLaunch) -> Outcome:
    """Start the ranks, wait until all have ended, and end all processes they started."""
    port = _free_port()
    pids = []
    for rank in range(launch.processes):
        pid = os.fork()
        if pid == 0:
            _run_rank(launch, rank, port)
        pids.append(pid)
    try:
        return _wait(pids, launch.limits)
    finally:
        for pid in pids:
            end_group(pid)
        end_children()


def _wait(pids: list[int], limits: ResourceLimits) -> Outcome:
    supervisor = Supervisor(limits)
    codes: dict[int, int] = {}
    ended_for = ""
    while len(codes) < len(pids):
        left = [pid for pid in pids if pid not in codes]
        for pid in left:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[pid] = os.waitstatus_to_exitcode(status)
                ended_for = ended_for or ("processor time" if codes[pid] == -signal.SIGXCPU else "")
                if codes[pid]:  # if it was killed, do not wait for the others
                    idle = 0.0 if codes[pid] < 0 else min(supervisor.limits.idle_seconds, _GRACE_SECONDS)
                    supervisor.limits = replace(supervisor.limits, idle_seconds=idle)
        violation = supervisor.violation([pid for pid in left if pid not in codes])
        if violation:
            # After a failure, waiting for the failed rank is not a hang.
            has_failed = any(codes.values())
            ended_for = ended_for or ("" if has_failed and violation == "hang" else violation)
            for pid in left:
                if pid not in codes:
                    os.kill(pid, signal.SIGKILL)
                    codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        time.sleep(_POLL_SECONDS)
    return Outcome(tuple(codes[pid] for pid in pids), ended_for)


def _run_rank(launch: ProgramLaunch, rank: int, port: int) -> None:
    code = 97
    leave = os._exit  # the recorder replaces os._exit
    try:
        os.setsid()
        os.chdir(launch.directory)
        _redirect()
        os.environ.update(_environment(launch, rank, port))
        tempfile.tempdir = None  # forget the temporary directory from before the fork
        _limit(launch.limits)
        random.seed()  # a new seed, as without a fork; torch starts with the same seed in every process
        np.random.seed()  # noqa: NPY002  # programs may use this old generator
        recorder = RankRecorder(rank, launch.watch)
        recorder.install()
        code = _run_program(launch, recorder)
    except BaseException:  # noqa: BLE001  # no exception may continue past the fork
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        leave(code)


def _run_program(launch: ProgramLaunch, recorder: RankRecorder) -> int:
    sys.argv = [launch.program, *launch.arguments]
    sys.path.insert(0, str(Path(launch.program).parent))
    code, message = 0, ""
    try:
        runpy.run_path(launch.program, run_name="__main__")
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if isinstance(leaving.code, str):
            sys.stderr.write(leaving.code + "\n")
    except BaseException as error:  # noqa: BLE001  # report whatever a student's program raises
        traceback.print_exc()
        code, message = 1, f"{type(error).__name__}: {error}".splitlines()[0][:300]
    if message:
        recorder.note_end(code, message)  # the next lines may never return
    # End as an interpreter does: wait for threads, then call the functions registered with atexit.
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001  # there is no public name
    atexit._run_exitfuncs()  # noqa: SLF001  # there is no public name
    recorder.note_end(code, message)
    return code & 0xFF


def _environment(launch: ProgramLaunch, rank: int, port: int) -> Mapping[str, str]:
    size = str(launch.processes)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": size,
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "HOME": launch.directory,
        "TMPDIR": launch.directory,
        "XDG_CACHE_HOME": launch.directory,
    }


def _redirect() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for target, source in ((0, nothing), (1, output), (2, output)):
        os.dup2(source, target)
    os.closerange(3, 1024)


def _limit(limits: ResourceLimits) -> None:
    seconds = int(limits.processor_seconds) + 1
    _lower(resource.RLIMIT_CPU, seconds, seconds + 5)  # first SIGXCPU, which shows the reason; later SIGKILL
    _lower(resource.RLIMIT_FSIZE, limits.file_bytes)
    _lower(resource.RLIMIT_CORE, 0)
    statm = Path("/proc/self/statm")
    if statm.exists():
        pages = int(statm.read_text().split()[0])
        _lower(resource.RLIMIT_AS, pages * resource.getpagesize() + limits.memory_bytes)


def _lower(what: int, value: int, last: int | None = None) -> None:
    _, hard = resource.getrlimit(what)
    soft, last = (
        each if hard == resource.RLIM_INFINITY else min(each, hard) for each in (value, value if last is None else last)
    )
    resource.setrlimit(what, (soft, last))


def _free_port() -> int:
    """Return a free port below the ephemeral range, so that no other socket gets it before the program binds it."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return port


def _preload() -> None:
    """Import the modules that programs need and read the data, once."""
    import torch._dynamo
    import torch.nn.parallel
    import torch.utils.data.distributed

    from paceline_course import assignment

    torch.set_num_threads(1)
    assignment.training_set()


if __name__ == "__main__":
    main()
