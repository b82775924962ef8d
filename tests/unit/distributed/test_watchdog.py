"""Who is waited for, what is said of it, and when nobody is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from torch.distributed import HashStore

from paceline.distributed.strategy import Heartbeat
from paceline.distributed.watchdog import RankStatus, Watchdog, WatchdogContext, diagnose
from paceline.errors import LostWorkerError, OneProcessError, TrainingError
from paceline.host.world import World

SOURCES = Path(__file__).parents[3] / "src"


def _at(rank: int, step: int, order: int, **more: object) -> RankStatus:
    return RankStatus(rank=rank, step=step, order=order, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sightings", "silent", "waited_for"),
    [
        pytest.param([_at(0, 5, 4), _at(1, 5, 4)], {}, [], id="all at the same place"),
        pytest.param([_at(0, 5, 4), _at(1, 5, 2)], {}, [1], id="an earlier part of the step"),
        pytest.param([_at(0, 5, 4), _at(1, 6, 1)], {}, [0], id="an earlier step"),
        pytest.param([_at(0, 5, 4), _at(1, 5, 2), _at(2, 5, 2)], {}, [1, 2], id="two of three"),
        pytest.param([_at(0, 5, 4), _at(1, 9, 1)], {1: 3.0}, [1], id="silent, wherever it was seen last"),
        pytest.param([_at(0, 5, 4), _at(1, 5, 9, failure="it broke")], {0: 3.0}, [1], id="failed"),
    ],
)
def test_who_is_waited_for(sightings: list[RankStatus], silent: dict[int, float], waited_for: list[int]) -> None:
    assert [each.rank for each in diagnose(sightings, silent)] == waited_for


def test_parts_of_a_step_are_comparable_whatever_the_number_of_micro_batches() -> None:
    one, many = Heartbeat(), Heartbeat()
    for heartbeat, micro_batches in ((one, 1), (many, 3)):
        heartbeat.begin_step(1)
        for index in range(micro_batches):
            heartbeat.enter("forward")
            heartbeat.enter("backward", last=index == micro_batches - 1)
    assert one.order == many.order
    one.enter("optimizer")
    assert one.order > many.order
    assert one.is_new
    one.enter("forward")
    assert not one.is_new


def _fails(dog: Watchdog, error: Exception) -> list[str]:
    with pytest.raises(type(error)) as caught, dog.watching():
        raise error
    return getattr(caught.value, "__notes__", [])


def test_an_error_gets_its_place_and_its_samples() -> None:
    heartbeat = Heartbeat()
    heartbeat.begin_step(7)
    heartbeat.enter("forward", samples=np.arange(20))
    dog = Watchdog(
        heartbeat, World(), None, timeout_seconds=60, context=WatchdogContext(name_of=lambda sample: f"{sample}.png")
    )
    (note,) = _fails(dog, ZeroDivisionError("oh"))
    names = ", ".join(f"{sample}.png" for sample in range(8))
    assert note == f"(in forward of step 7, with {names} and 12 more)"


def test_what_all_processes_raise_alike_gets_no_place() -> None:
    assert _fails(Watchdog(Heartbeat(), World(), None, timeout_seconds=60), TrainingError("all of us")) == []
    assert _fails(Watchdog(Heartbeat(), World(), None, timeout_seconds=60), OneProcessError("only me")) != []


def test_the_death_of_a_loader_process_gets_no_place() -> None:
    """It is raised wherever the main thread is just then."""
    assert _fails(Watchdog(Heartbeat(), World(), None, timeout_seconds=60), LostWorkerError("DataLoader worker")) == []


def test_an_error_tells_what_befell_another_process_before() -> None:
    store = HashStore()
    dogs = [Watchdog(Heartbeat(), World(rank=rank, world_size=2), store, timeout_seconds=60) for rank in (0, 1)]
    for dog in dogs:
        dog.heartbeat.begin_step(3)
    _fails(dogs[1], KeyError("lost"))
    (note,) = _fails(dogs[0], RuntimeError("connection closed"))
    first, second = note.splitlines()
    assert first.startswith("(rank 0 on ")
    assert second.startswith("(rank 1 on ")
    assert second.endswith(", in start of step 3, had failed: KeyError: 'lost')")


def test_in_a_world_of_one_no_thread_is_started() -> None:
    before = threading.active_count()
    with Watchdog(Heartbeat(), World(), None, timeout_seconds=60).watching():
        assert threading.active_count() == before


# Two that watch each other, as two processes would; they get on while the file is there.
PAIR = """
import pathlib, sys, threading, time
from torch.distributed import HashStore
from paceline.distributed.strategy import Heartbeat
from paceline.distributed.watchdog import Watchdog
from paceline.host.world import World

file, seconds, is_start = pathlib.Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "start"
timeout_seconds = float(sys.argv[4])
store, begun = HashStore(), time.monotonic()

def work(rank):
    heartbeat = Heartbeat()
    heartbeat.begin_step(1)
    heartbeat.enter("forward")
    if not is_start:
        heartbeat.enter("backward")
        heartbeat.enter("forward")
    with Watchdog(heartbeat, World(rank=rank, world_size=2), store, timeout_seconds=timeout_seconds).watching():
        while time.monotonic() - begun < seconds:
            time.sleep(0.3)
            if file.exists():
                heartbeat.tick()

threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
print("begun", flush=True)
for each in threads:
    each.start()
for each in threads:
    each.join()
"""


@pytest.fixture
def pair() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start the two; they get on, and end after so many seconds, if the file is there."""
    started: list[subprocess.Popen[str]] = []

    def starter(file: Path, seconds: float, how: str, timeout_seconds: float = 1.0) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PAIR, str(file), str(seconds), how, str(timeout_seconds)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(SOURCES)},
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        return process

    yield starter
    for process in started:
        process.kill()
        process.communicate()


Pair = Callable[..., subprocess.Popen[str]]


@pytest.mark.parametrize(("how", "at_least"), [("later", 0.9), ("start", 6.0)])
def test_how_long_all_may_stand_still(pair: Pair, tmp_path: Path, how: str, at_least: float) -> None:
    process, started = pair(tmp_path / "no file", 60, how), time.monotonic()
    _, err = process.communicate(timeout=50)
    assert process.returncode == 1
    assert at_least - 0.5 < time.monotonic() - started < 30
    assert "All are stuck in forward of step 1 (parallel.timeout is 1.0 s)." in err


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no process can be stopped here")
def test_processes_that_were_all_stopped_for_long_go_on(pair: Pair, tmp_path: Path) -> None:
    """As by a batch system that suspends a job: nobody was waited for in vain."""
    file = tmp_path / "file"
    file.touch()
    process = pair(file, 11, "later", 3.0)
    for _ in range(2):
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(4)
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.5)
    _, err = process.communicate(timeout=50)
    assert (process.returncode, err) == (0, "")
