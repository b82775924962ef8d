"""What becomes of the workers when the run is stopped, killed, or hangs: real processes and real signals."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import fork_server
import pytest

from paceline.data.image.source import FileSource

MakeSource = Callable[..., FileSource]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc and /dev/shm")

RUN = textwrap.dedent(
    """
    import itertools, os, signal, sys, time
    from pathlib import Path

    import numpy as np

    from paceline.data.loaders.pytorch import PytorchBackend
    from paceline.data.slices import SampleSlice
    from paceline.data.image.source import FileSource
    from paceline.data.image.transforms import View

    root, mode = Path(sys.argv[1]), sys.argv[2]

    class Source(FileSource):
        def read(self, sample):
            if (mode == "hang" and sample == 21) or (mode == "first" and sample == 3):
                time.sleep(1000)
            return super().read(sample)

    names = sorted(os.fsencode(path.name) for path in root.glob("*.png"))
    source = Source(root, names, np.zeros(len(names), dtype=np.int64), 3)
    stopped = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: stopped.append(number))

    def endless():
        for step in itertools.count():
            ids = (np.arange(4) + 4 * step) % len(names)
            yield SampleSlice(step=step, epoch=0, logical_rank=0, ids=ids, step_weight=4)

    backend = PytorchBackend(source, View(image_size=64, channels=3), workers=2, prefetch=2)
    stream = backend.batches(endless())
    if mode != "first":
        for step in range(3):
            next(stream)
    print("ready", flush=True)
    if mode == "first":
        next(stream)
    if mode == "leave":
        sys.exit(0)
    while not stopped:
        if mode == "run":
            next(stream)
        time.sleep(0.01)
    if mode == "run":
        # The workers go on after the signal.
        steps = [next(stream).slice.step for _ in range(12)]
        assert steps == list(range(steps[0], steps[0] + 12)), steps
    backend.close()
    print("closed", flush=True)
    """
)


@dataclass
class Run:
    """A process of its own that reads batches with two workers, and what it may leave behind."""

    process: subprocess.Popen[str]
    workers: set[int]
    temporary: Path

    def check_gone(self) -> None:
        """Neither a worker is left, nor a file in shared memory that carries one of its process ids, nor another."""
        wait_until_gone(self.workers)
        owners = {str(pid) for pid in (self.process.pid, *self.workers)}
        shared = [name for name in os.listdir("/dev/shm") if owners & set(re.split(r"\D+", name))]
        assert shared + [str(path) for path in self.temporary.rglob("*")] == []


@pytest.fixture
def start(tmp_path: Path, make_source: MakeSource) -> Iterator[Callable[[str], Run]]:
    """Start the run in a mode and wait until its workers are at work."""
    images = tmp_path / "images"
    images.mkdir()
    # Not in pytest's directory: a socket's path may have 107 characters.
    temporary = Path(tempfile.mkdtemp(prefix="paceline-test-"))
    make_source(images, [(64, 64)] * 40)
    runs = []

    def starter(mode: str) -> Run:
        process = fork_server.Popen(
            [sys.executable, "-W", "error", "-c", RUN, str(images), mode],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise AssertionError(process.communicate()[1])
        runs.append(Run(process, workers_of(process.pid), temporary))
        return runs[-1]

    yield starter
    for run in runs:
        for pid in (run.process.pid, *run.workers):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        run.process.communicate()
    shutil.rmtree(temporary)


def test_workers_ignore_what_stops_the_run(start: Callable[[str], Run]) -> None:
    run = start("run")
    assert len(run.workers) == 2
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        os.killpg(run.process.pid, number)
    output, errors = run.process.communicate(timeout=60)
    assert (run.process.returncode, output, errors) == (0, "closed\n", "")
    run.check_gone()


@pytest.mark.parametrize(
    "mode", ["run", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("hang", "first"))]
)
def test_a_killed_run_leaves_nothing(start: Callable[[str], Run], mode: str) -> None:
    """No hanging worker either, nor one that has handed over a part of its first batch."""
    run = start(mode)
    time.sleep(0.5 if mode == "first" else 0)
    run.process.kill()
    run.process.wait()
    run.check_gone()


def test_closing_does_not_wait_for_a_hanging_worker(start: Callable[[str], Run]) -> None:
    run = start("hang")
    os.kill(run.process.pid, signal.SIGTERM)
    output, errors = run.process.communicate(timeout=60)  # the worker sleeps for a thousand seconds
    assert (run.process.returncode, output, errors) == (0, "closed\n", "")
    run.check_gone()


def test_leaving_without_closing(start: Callable[[str], Run]) -> None:
    run = start("leave")
    _, errors = run.process.communicate(timeout=60)
    assert (run.process.returncode, errors) == (0, "")
    run.check_gone()


def workers_of(parent: int) -> set[int]:
    """Return the child processes of a process."""
    children = Path(f"/proc/{parent}/task").glob("*/children")
    return {int(pid) for path in children for pid in path.read_text().split()}


def alive(pid: int) -> bool:
    """Say whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids: set[int], limit: float = 20) -> None:
    start = time.monotonic()
    while any(map(alive, pids)):
        if time.monotonic() - start > limit:
            left = {pid for pid in pids if alive(pid)}
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"still there after {limit} s: {left}")
        time.sleep(0.05)
