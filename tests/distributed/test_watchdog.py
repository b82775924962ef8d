"""A rank that hangs is named, with where it hangs, and the run ends; one that is only slow is waited for.

Each run meets its fault after a checkpoint, ends by itself, leaves nothing behind, and goes on without the fault.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import Call
from paceline.reports.audit import used_samples

pytestmark = [pytest.mark.world_size(2), pytest.mark.slow]

SHORT = "parallel.timeout=5 seconds"
TIMEOUT_SECONDS = 10
# What is promised: the timeout, and ten seconds in which the launcher waits for the others; a slow machine takes more.
SECONDS_TO_END = TIMEOUT_SECONDS + 10 + 20

# Does what the environment names on that rank in the fifth step: one training pass is the rehearsal, two are a step.
# Before its first pass it waits until the test has laid its traps.
FAULTY = """
import os, pathlib, signal, threading, time
from torch import nn

if os.environ.get("HOW") == "long save":
    fsync = os.fsync
    # A slow disk, for what is written beside training.
    os.fsync = lambda number: (threading.current_thread() is threading.main_thread() or time.sleep(1.0), fsync(number))

HOW, HERE = os.environ.get("HOW", ""), os.environ.get("RANK") in os.environ.get("ON", "").split(",")

def lie_down_for_ever():
    pathlib.Path(os.environ["TRACE"]).write_text("here")
    while True:
        time.sleep(1000)

def come_later(seconds):
    pathlib.Path(os.environ["TRACE"]).write_text("here")
    time.sleep(seconds)

class Faulty(nn.Module):
    def __init__(self, num_classes, in_channels):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(in_channels * 144, num_classes))
        self.passes = 0

    def forward(self, x):
        while "GATE" in os.environ and not os.path.exists(os.environ["GATE"]):
            time.sleep(0.01)
        if not self.training:
            if HOW == "evaluate" and HERE and self.passes >= 10:
                lie_down_for_ever()
            if HOW == "long evaluation":
                come_later(1.2)
            return self.body(x)
        self.passes += 1
        if HERE and HOW == "first" and self.passes == 1:
            come_later(float(os.environ["SECONDS"]))
        if HERE and self.passes == 10:
            match HOW:
                case "forward":
                    lie_down_for_ever()
                case "slow":
                    come_later(float(os.environ["SECONDS"]))
                case "raise":
                    pathlib.Path(os.environ["TRACE"]).write_text("here")
                    raise ZeroDivisionError("the tenth is too many")
                case "stopped":
                    pathlib.Path(os.environ["TRACE"]).write_text("here")
                    os.kill(os.getpid(), signal.SIGSTOP)
        return self.body(x)
"""
TRAIN = (
    *("train", "recipe.yaml", "model.name=faulty:Faulty", "model.options=null", "train.precision=fp32"),
    *("data.workers=0", "train.duration=12 steps", "evaluate.every=5 steps", "checkpoint.every=4 steps"),
    f"parallel.timeout={TIMEOUT_SECONDS} seconds",
)
HOST = socket.gethostname()


@pytest.fixture
def faulty(studio: Path, start: Call, run: Call, tmp_path: Path) -> Call:
    """Train with a fault, and return how it ended, and how long after the fault; without it, it goes on."""
    (studio / "faulty.py").write_text(FAULTY)
    run_dir, trace = tmp_path / "run", tmp_path / "trace"

    def trainer(
        how: str,
        *more: str,
        on: str = "1",
        launcher: tuple[str, ...] = ("--processes", "2"),
        limit: float = SECONDS_TO_END,
        goes_on: bool = True,
        **options: Any,
    ) -> tuple[Any, float]:
        variables = {"HOW": how, "ON": on, "TRACE": str(trace), **options.pop("variables", {})}
        command = (*TRAIN, *more, "--run-dir", run_dir, *launcher)
        launched = start(*command, where=studio, variables=variables, **options)
        launched.wait_for(trace.exists)
        begun = time.monotonic()
        done = launched.wait(limit)
        seconds = time.monotonic() - begun
        print(f"ended after {seconds:.1f} s\n{done.err}")
        launched.seconds_until_alone(5)
        assert launched.leftovers() == []
        if goes_on:
            assert "resumed from step-00000004" in run(*command, where=studio, **options).ended(0).out
        return done, seconds

    return trainer


def _tells(done: Any, phase: str, culprit: str, *, step: int = 5) -> None:
    """The end names rank 1, its host, the step, the phase, and the function it is in; on the launcher's first line."""
    assert done.code == 1, done.err
    told = done.err[done.err.index("paceline: no process has made progress") :]
    assert f"rank 1 on {HOST}, in {phase} of step {step}" in told
    assert f", in {culprit}\n" in told
    assert "rank 0" not in told
    assert f"The others wait for rank 1 on {HOST}, in {phase} of step {step} (parallel.timeout is 10.0 s)." in told
    assert done.err.count("no process has made progress") == 1


@pytest.mark.parametrize(
    ("how", "phase", "culprit"),
    [
        ("forward", "forward", "lie_down_for_ever"),
        pytest.param("evaluate", "evaluate", "lie_down_for_ever", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.everyday
def test_a_rank_that_hangs_is_named(faulty: Call, how: str, phase: str, culprit: str) -> None:
    done, seconds = faulty(how)
    _tells(done, phase, culprit)
    # Before the exchange in which the other one waits gives up, which would tell nothing.
    assert "Timed out" not in done.err
    assert seconds > 0.5 * TIMEOUT_SECONDS


def test_torchrun_ends_with_it(faulty: Call) -> None:
    done, _ = faulty("forward", launcher=(), torchrun=2)
    assert done.code != 0
    for rank in (0, 1):
        said = f"paceline: rank {rank}: no process has made progress for 9.0 s:\nrank 1 on {HOST}, in forward of"
        assert said in done.err
    assert f"The others wait for rank 1 on {HOST}, in forward of step 5" in done.err


@pytest.mark.thorough
def test_a_rank_that_is_stopped_for_good_is_named(faulty: Call) -> None:
    done, _ = faulty("stopped", goes_on=False)
    assert done.code == 1
    assert re.search(rf"\nrank 1 on {HOST}, last seen in .+, has not reported for \d\.\d s: it was", done.err)
    assert f"The others wait in backward of step 5, for rank 1 on {HOST} (parallel.timeout" in done.err
    assert "Timed out" not in done.err


def _trap(studio: Path, run: Call) -> Path:
    """The image that rank 1 reads in step 5 and nobody before, as an undisturbed run tells."""
    (studio / "faulty.py").write_text(FAULTY)
    before = studio / "before-the-trap"
    if not (before / "summary.json").exists():
        run(*TRAIN, "train.duration=6 steps", "--run-dir", before, "--processes", "2", where=studio).ended(0)
    ids = [entry.ids for entry in used_samples(before, 1) if entry.step == 5]
    return sorted((studio / "photos" / "train").rglob("*.png"))[int(np.concatenate(ids)[-1])]


@pytest.fixture
def trapped(studio: Path, start: Call, run: Call, tmp_path: Path) -> Iterator[Callable[[int], tuple[Any, Path]]]:
    """Start a run in which rank 1 comes to an image that never comes: a pipe that nobody writes to.

    Afterwards, with the image in its place, it must go on.
    """
    image, kept = _trap(studio, run), tmp_path / "kept.png"
    gate, run_dir = tmp_path / "gate", tmp_path / "run"
    command: tuple[Any, ...] = ()

    def starter(workers: int) -> tuple[Any, Path]:
        nonlocal command
        command = (*TRAIN, f"data.workers={workers}", "--processes", "2", "--run-dir", run_dir)
        launched = start(*command, where=studio, variables={"GATE": str(gate)})
        launched.wait_for((run_dir / "events.jsonl").exists)
        image.rename(kept)
        os.mkfifo(image)
        gate.touch()
        return launched, image

    try:
        yield starter
    finally:
        if kept.exists():
            kept.replace(image)
    assert "resumed from step-00000004" in run(*command, where=studio).ended(0).out


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_never_comes_is_named(trapped: Callable[[int], tuple[Any, Path]], workers: int) -> None:
    launched, image = trapped(workers)
    done = launched.wait(SECONDS_TO_END + 30)
    _tells(done, "data_wait", "_from_workers" if workers else "_in_process")
    who = r"worker 0 \(pid \d+\)" if workers else "the run's own process"
    assert re.search(rf"waiting to be read: {who} was last at sample \d+ \({re.escape(str(image))}\)", done.err)
    launched.seconds_until_alone(5)
    assert launched.leftovers() == []


def test_a_worker_that_dies_is_told_with_its_file_and_its_rank(
    trapped: Callable[[int], tuple[Any, Path]], tmp_path: Path
) -> None:
    launched, image = trapped(1)
    pipe: list[int] = []

    def is_being_read() -> bool:
        with contextlib.suppress(OSError):  # a pipe that nobody reads cannot be opened so
            pipe.append(os.open(image, os.O_WRONLY | os.O_NONBLOCK))
        return bool(pipe)

    launched.wait_for(is_being_read)
    readers: list[int] = []
    launched.wait_for(lambda: readers.extend(pid for pid in launched.family() if _has_open(pid, image)) or readers)
    launched.wait_for((tmp_path / "run" / "checkpoints" / "step-00000004").exists)
    os.kill(readers[0], signal.SIGKILL)
    done = launched.wait(SECONDS_TO_END)
    os.close(pipe[0])
    assert done.code == 1
    assert re.search(rf"worker \(pid\(?s?\)? {readers[0]}\) .*(killed|exited)", done.err), done.err
    assert re.search(rf"sample \d+ \({re.escape(str(image))}\)", done.err), done.err
    assert re.search(rf"^\(rank 1 on {HOST}, in data_wait of step [345]\)", done.err, re.MULTILINE), done.err
    launched.seconds_until_alone(5)


def _has_open(pid: int, path: Path) -> bool:
    with contextlib.suppress(OSError):
        return any(os.path.realpath(each) == str(path) for each in Path(f"/proc/{pid}/fd").iterdir())
    return False


@pytest.mark.thorough
def test_an_error_says_on_which_host_and_in_which_step_with_which_samples(faulty: Call) -> None:
    done, _ = faulty("raise", goes_on=False)
    assert done.code == 1
    assert done.err.startswith("paceline: rank 1 failed first:\nTraceback")
    assert re.search(
        rf"\n\(rank 1 on {HOST}, in forward of step 5, with (\S+/photos/train/\w+/\d+.png(, )?){{4}}\)", done.err
    )
    # The other one knows by then why its exchange broke off.
    _, then, heard = done.err.partition("paceline: rank 0 then: RuntimeError: ")
    assert then
    assert re.search(rf"^\(rank 0 on {HOST}, in \w+ of step 5, with ", heard, re.MULTILINE)
    assert re.search(rf"^\(rank 1 on {HOST}, in forward of step 5, had failed: ZeroDiv", heard, re.MULTILINE)


@pytest.mark.thorough
def test_all_that_stand_still_are_shown(faulty: Call) -> None:
    done, _ = faulty("forward", on="0,1", goes_on=False)
    assert done.code == 1
    for rank in (0, 1):
        assert f"rank {rank} on {HOST}, in forward of step 5, for " in done.err
    assert done.err.count(", in lie_down_for_ever\n") >= 2
    assert "All are stuck in forward of step 5 (parallel.timeout is 10.0 s)." in done.err


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "more", "variables"),
    [
        ("slow", (), {"ON": "1", "SECONDS": "6"}),
        ("first", (SHORT,), {"ON": "0,1", "SECONDS": "10"}),
        ("long evaluation", (SHORT, "evaluate.every=6 steps", "train.ema=0.9"), {}),
        ("long save", (SHORT, "checkpoint.every=12 steps"), {}),
    ],
)
def test_is_waited_for(
    studio: Path, run: Call, tmp_path: Path, how: str, more: tuple[str, ...], variables: dict[str, str]
) -> None:
    (studio / "faulty.py").write_text(FAULTY)
    variables = {"HOW": how, "TRACE": str(tmp_path / "trace"), **variables}
    begun = time.monotonic()
    done = run(
        *(*TRAIN, "evaluate.every=off", *more, "--processes", "2", "--run-dir", tmp_path / "run"),
        where=studio,
        variables=variables,
    )
    print(done.err)
    assert (done.code, done.err) == (0, "")
    assert time.monotonic() - begun > 6


@pytest.mark.thorough
def test_a_first_rank_that_is_stopped_and_keeps_the_store_is_named(studio: Path, start: Call, tmp_path: Path) -> None:
    """Without a launcher the store is in the first rank's process, and does not answer either."""
    (studio / "faulty.py").write_text(FAULTY)
    port = random.SystemRandom().randrange(20_000, 32_000)  # below those that a socket gets which asks for any
    trace = tmp_path / "trace"
    ranks = [
        start(
            *(*TRAIN, "--run-dir", tmp_path / "run"),
            where=studio,
            variables={
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "HOW": "stopped",
                "ON": "0",
                "TRACE": str(trace),
            },
        )
        for rank in (0, 1)
    ]
    ranks[1].wait_for(trace.exists)
    done = ranks[1].wait(SECONDS_TO_END).ended(1)
    assert re.search(r"\(the store, which rank 0 may keep, has not answered for \d", done.err), done.err
    assert f"(rank 1 on {HOST}, in backward of step 5" in done.err
