"""Grade a student's program: run it several times in a scratch directory and observe it."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import LaunchError, PacelineError
from paceline.host.processes import ProcessGroup
from paceline_course.grading.marks import Marks
from paceline_course.grading.supervise import ResourceLimits

BASE_LR, WARMUP = 0.05, 6
_PLAIN_EPOCHS, _PLAIN_BATCH = 3, 48
_BATCHNORM_EPOCHS, _BATCHNORM_BATCH = 8, 50
_STEPS_IN_EPOCH = 13  # 12 steps of 48 samples and one of 2
_KILL_AT_STEP = _STEPS_IN_EPOCH + 5


@dataclass(frozen=True)
class GradingTrial:
    """One run of a grading.

    Attributes:
        name: Name that criteria use.
        processes: World size.
        directory: Working directory; a run resumes from an earlier run with the same one.
        network: ``plain`` or ``batchnorm``.
        kill_at_step: Step before which all ranks are killed; None for never.
        tear: Whether a rank is killed while it saves.
    """

    name: str
    processes: int
    directory: str
    network: str = "plain"
    kill_at_step: int | None = None
    tear: bool = False

    @property
    def is_bare(self) -> bool:
        """Whether this runs the bare loop instead of the program."""
        return self.name.startswith("pace")


TRIALS = (
    GradingTrial("one", 1, "one"),
    GradingTrial("two", 2, "two"),
    GradingTrial("three", 3, "three"),
    GradingTrial("pace-before", 2, "pace", network="batchnorm"),
    GradingTrial("batchnorm", 2, "batchnorm", network="batchnorm"),
    GradingTrial("pace-after", 2, "pace", network="batchnorm"),
    GradingTrial("killed", 2, "killed", kill_at_step=_KILL_AT_STEP),
    GradingTrial("resumed", 2, "killed", tear=True),
    GradingTrial("again", 2, "killed"),
)


class RunHost:
    """The process that starts runs; it can serve several gradings."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
            "MKL_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        environment.pop("PYTHONUNBUFFERED", None)
        self._group = ProcessGroup()
        self._process = self._group.start(
            [sys.executable, "-P", "-m", "paceline_course.grading.host"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ).process

    def run(self, launch: Any) -> dict[str, Any]:
        """Start a run, wait for its end, and return how it ended.

        Raises:
            LaunchError: If the host itself has died.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(asdict(launch)).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if not answer:
            raise LaunchError(f"The process that starts the runs has ended with exit code {self._process.wait()}.")
        outcome: dict[str, Any] = json.loads(answer)
        return outcome

    def close(self) -> None:
        """End the process and its children."""
        self._group.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def grade(
    path: Path,
    *,
    on_progress: Callable[[str], None] = lambda _: None,
    limits: ResourceLimits | None = None,
    host: RunHost | None = None,
) -> Marks:
    """Run a program of the assessment with 1, 2 and 3 processes, observe it, and mark what it does.

    Args:
        path: The program, a Python file. It is copied; nothing is written to its folder.
        on_progress: Called with one short line as each run begins.
        limits: Resource limits of one run.
        host: The host that starts the runs; None to start one for this grading.

    Returns:
        The marks, out of 100 points.

    Raises:
        PacelineError: If there is no such file, or it is a notebook.
    """
    if not path.is_file():
        raise PacelineError(f"There is no file {path}; name the Python file of your training program.")
    if path.suffix == ".ipynb":
        raise PacelineError(f"{path} is a notebook; name a Python file that torchrun can run.")
    begin, processor = time.monotonic(), _processor_seconds()
    with (
        tempfile.TemporaryDirectory(prefix="paceline-grading-", ignore_cleanup_errors=True) as scratch,
        closing(RunHost()) if host is None else nullcontext(host) as started,
    ):
        marks = _grade(path, Path(scratch).resolve(), on_progress, limits or ResourceLimits(), started)
    return replace(marks, seconds=time.monotonic() - begin, processor_seconds=_processor_seconds() - processor)


def _grade(
    path: Path, scratch: Path, on_progress: Callable[[str], None], limits: ResourceLimits, host: RunHost
) -> Marks:
    import torch

    from paceline_course.grading import on_run
    from paceline_course.grading.marks import marking_sheet
    from paceline_course.grading.on_run import RequestedSchedule
    from paceline_course.grading.runs import Runs

    program = scratch / "program" / "train.py"
    program.parent.mkdir()
    shutil.copyfile(path, program)
    runs: dict[str, Any] = {}
    for trial in TRIALS:
        if not _should_run(trial, runs):
            continue
        on_progress(_description(trial))
        runs[trial.name] = _run_trial(trial, program, scratch, limits, host)
    found = Runs(runs)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the networks are tiny: more threads would only wait for each other
    try:
        for name in on_run.THROUGHPUT_REPEATS:
            if on_run.throughput(found).reason and "batchnorm" in found.complete("batchnorm"):
                again = GradingTrial(name, 2, name, network="batchnorm")
                on_progress(f"{_description(again)}, to measure throughput again")
                runs[name] = _run_trial(again, program, scratch, limits, host)
        return Marks(tuple(item.mark(found) for item in marking_sheet(RequestedSchedule(BASE_LR, WARMUP))))
    finally:
        torch.set_num_threads(threads)


def _should_run(trial: GradingTrial, runs: dict[str, Any]) -> bool:
    """Return False for runs that would only fail again: a program that never ends does not run nine times."""
    if any(run.ended_for and run.ended_for != "hang" for run in runs.values()):
        return False
    if trial.name in ("one", "two", "three"):
        return True
    has_trained = any(runs[name].is_complete for name in ("two", "three"))
    return has_trained and (trial.directory != "killed" or runs["two"].is_complete)


def _description(trial: GradingTrial) -> str:
    if trial.is_bare:
        return "the bare loop, to measure throughput"
    what = {"killed": ", killed", "resumed": ", restarted, killed while saving", "again": ", restarted"}
    processes = "1 process" if trial.processes == 1 else f"{trial.processes} processes"
    return f"{processes}, network {trial.network}{what.get(trial.name, '')}"


def _run_trial(trial: GradingTrial, program: Path, scratch: Path, limits: ResourceLimits, host: RunHost) -> Any:
    from paceline_course.grading import baseline
    from paceline_course.grading.host import ProgramLaunch
    from paceline_course.grading.recorder import RecordingOptions
    from paceline_course.grading.runs import read_run

    directory, notes = scratch / "runs" / trial.directory, scratch / "notes" / trial.name
    output = directory / "output"
    directory.mkdir(parents=True, exist_ok=True)
    notes.mkdir(parents=True)
    epochs, batch = (_PLAIN_EPOCHS, _PLAIN_BATCH) if trial.network == "plain" else (_BATCHNORM_EPOCHS, _BATCHNORM_BATCH)
    if trial.is_bare:
        arguments = ["--batch", str(batch), "--steps", str(5 * _STEPS_IN_EPOCH), "--network", trial.network]
    else:
        arguments = [
            *("--output", str(output), "--epochs", str(epochs), "--batch", str(batch)),
            *("--base-lr", str(BASE_LR), "--warmup", str(WARMUP), "--network", trial.network),
        ]
    launch = ProgramLaunch(
        program=baseline.__file__ if trial.is_bare else str(program),
        arguments=tuple(arguments),
        processes=trial.processes,
        directory=str(directory),
        watch=RecordingOptions(str(notes), str(directory), str(output), trial.kill_at_step, trial.tear),
        limits=limits,
    )
    return read_run(notes, output, epochs=epochs, batch=batch, **host.run(launch))


def _processor_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
