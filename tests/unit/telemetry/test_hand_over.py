"""A tracker of its own process can be slow, hang, raise or die: nobody waits for it, and what it lacks is counted."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import TrainingError
from paceline.records.events import FinishEvent, StepEvent
from paceline.telemetry.hand_over import HandOver, TrackerBehindError, TrackerLostError
from paceline.telemetry.trackers import Guarded

# A library of the name that misbehaves; everything of ours is the real thing.
LIBRARY = """
import os, sys, time
{at_import}
class Settings:
    def __init__(self, **_): pass
class Run:
    summary = {{}}
    def log(self, found, step):
        {at_log}
        with open(os.environ["LOGGED"], "a") as file: file.write(f"{{step}} ")
    def finish(self, exit_code):
        {at_finish}
        with open(os.environ["LOGGED"], "a") as file: file.write(f"finished {{exit_code}}")
def init(**_):
    return Run()
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """``library(at_log="raise ...")`` is what the tracker's process imports as wandb; returns what it logs to."""

    def write(at_import: str = "pass", at_log: str = "pass", at_finish: str = "pass") -> Path:
        folder = tmp_path / "library" / "wandb"
        folder.mkdir(parents=True)
        text = LIBRARY.format(at_import=at_import, at_log=at_log, at_finish=at_finish)
        (folder / "__init__.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(folder.parent))
        monkeypatch.syspath_prepend(str(folder.parent))
        monkeypatch.setenv("LOGGED", str(tmp_path / "logged"))
        return tmp_path / "logged"

    return write


@pytest.fixture
def hand_over(tmp_path: Path) -> Iterator[Callable[..., HandOver]]:
    made: list[HandOver] = []

    def make(**options: Any) -> HandOver:
        facts = {"name": "run", "recipe": {"seed": 1}, "environment": {}}
        made.append(HandOver("wandb", tmp_path / "run" / "wandb", facts, **options))
        return made[-1]

    yield make
    for each in made:
        assert each._process is None


def step(number: int, **more: Any) -> dict[str, Any]:
    return StepEvent(step=number, epoch=1, samples=number, loss=1.0, lr=0.5, **more).to_json()


FINISH = FinishEvent(step=9, status="completed", train_seconds=1.0, total_seconds=1.0).to_json()


def test_every_record_arrives_in_order(library: Any, hand_over: Any) -> None:
    logged = library(at_import="print('x' * 10**6); print('y' * 10**6, file=sys.stderr)")
    tracker = hand_over()
    for number in range(1, 301):
        tracker.write(step(number))
    tracker.write(FINISH)
    tracker.close(60)
    tracker.close(60)
    assert logged.read_text() == " ".join(map(str, range(1, 301))) + " finished 0"


@pytest.mark.parametrize(
    ("misbehaving", "told"),
    [
        ({"at_import": "raise RuntimeError('a broken build')"}, "RuntimeError: a broken build"),
        ({"at_import": "os._exit(7)"}, "exit code 7"),
        ({"at_import": "os.kill(os.getpid(), 11)"}, "signal 11"),
        ({"at_log": "raise ValueError('no such project')"}, "ValueError: no such project"),
        ({"at_finish": "raise OSError('no network')"}, "OSError: no network"),
        ({"at_log": "raise OSError('https://me:secret@host/x')"}, r"//\*\*\*@host/x"),
    ],
)
def test_what_fails_over_there_is_told_here(misbehaving: Any, told: str, library: Any, hand_over: Any) -> None:
    library(**misbehaving)
    tracker = hand_over()

    def hand_all() -> None:
        for number in range(1, 5):
            tracker.write(step(number))
        tracker.write(FINISH)
        tracker.close(60)

    with pytest.raises(TrackerLostError, match=told):
        hand_all()
    tracker.close(0)
    assert "secret" not in (tracker._directory / "paceline.log").read_text()


@pytest.mark.parametrize("where", ["at_import", "at_log", "at_finish"])
def test_one_that_hangs_is_ended_and_what_it_lacks_is_counted(where: str, library: Any, hand_over: Any) -> None:
    library(**{where: "time.sleep(10**6)"})
    tracker = hand_over()
    for number in range(1, 8):
        tracker.write(step(number))
    tracker.write(FINISH)
    taken, deadline = 7 if where == "at_finish" else 0, time.monotonic() + 60
    while tracker._done < taken and time.monotonic() < deadline:
        tracker._listen()
    with pytest.raises(TrackerLostError, match=f"{8 - taken} of 8 records"):
        tracker.close(0.5)


def test_one_that_was_long_done_is_heard_however_late_it_is(library: Any, hand_over: Any) -> None:
    logged = library()
    tracker = hand_over()
    tracker.write(step(1))
    tracker.write(FINISH)
    deadline = time.monotonic() + 60
    while "finished" not in (logged.read_text() if logged.exists() else "") and time.monotonic() < deadline:
        time.sleep(0.05)
    tracker._process.wait(60)
    tracker.close(-5)  # another one has used up the time


def test_descriptors_may_have_large_numbers(library: Any, hand_over: Any) -> None:
    library()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit[1] < 4096:
        pytest.skip("this machine lends no more descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit[0], 4096), limit[1]))
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        tracker = hand_over()
        tracker.write(step(1))
        tracker.write(FINISH)
        tracker.close(60)
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def test_the_end_of_a_run_always_finds_room(library: Any, hand_over: Any) -> None:
    logged = library(at_import="time.sleep(2)")
    tracker = hand_over(most_waiting=5)
    behind = []
    for number in range(1, 60):
        try:
            tracker.write(step(number, details={"text": "x" * 10_000}))
        except TrackerBehindError as error:
            behind.append(error)
    assert behind
    tracker.write(FINISH)
    with pytest.raises(TrackerLostError, match="did not take"):
        tracker.close(60)
    assert logged.read_text().endswith("finished 0")


def test_what_finds_no_room_is_left_out_and_counted(library: Any, hand_over: Any) -> None:
    library(at_import="time.sleep(10**6)")
    tracker = hand_over(most_waiting=5)
    long = {"details": {"text": "x" * 10_000}}

    def flood() -> None:
        for number in range(100):
            tracker.write(step(number, **long))

    with pytest.raises(TrackerBehindError, match="5 records wait"):
        flood()
    before = tracker.left_out
    for _ in range(1000):
        tracker.write(step(1, **long))  # and says no more of it
    assert tracker.left_out == before + 1000
    with pytest.raises(TrackerLostError, match=r"did not take (\d+) of \1 records"):
        tracker.close(0.1)


def test_the_process_ends_with_the_one_that_it_serves(library: Any, tmp_path: Path) -> None:
    logged = library(at_log="time.sleep(0.1)")
    facts = {"name": "run", "recipe": {}, "environment": {}}
    child = os.fork()
    if child == 0:
        # Killed in the middle: nobody says that it is over.
        tracker = HandOver("wandb", tmp_path / "run" / "wandb", facts)
        for number in range(1, 11):
            tracker.write(step(number))
        time.sleep(0.5)
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    deadline = time.monotonic() + 60
    while "finished" not in (logged.read_text() if logged.exists() else "") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert logged.read_text() == "1 2 3 4 5 6 7 8 9 10 finished 1"


class Breaks:
    """A tracker that raises where it is asked to."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.calls: list[str] = []

    def write(self, event: Any) -> None:
        self.calls.append("write")
        raise self.error

    def close(self, seconds: float) -> None:
        self.calls.append("close")
        raise self.error


def test_the_first_error_of_a_tracker_is_told_and_is_its_last() -> None:
    tracker = Breaks(OSError(28, "No space left on device"))
    guarded = Guarded("tensorboard", tracker)
    assert "No space left" in guarded.write(step(1))
    assert [guarded.write(step(2)), guarded.close(1), guarded.close(1)] == ["", "", ""]
    assert tracker.calls == ["write", "close", "close"]


def test_one_that_falls_behind_goes_on() -> None:
    tracker = Breaks(TrackerBehindError("does not keep up"))
    guarded = Guarded("wandb", tracker)
    assert guarded.write(step(1)) == guarded.write(step(2)) == "wandb does not keep up."


# ------------------------------------------------------------------------------------------------ in a run

RECORDS = {"telemetry.log_every": "1 steps", "evaluate.every": "2 steps"}


@pytest.mark.parametrize(
    ("misbehaving", "told"),
    [
        ({"at_import": "raise RuntimeError('a broken build')"}, "a broken build"),
        ({"at_log": "time.sleep(10**6)"}, "did not take"),
        ({"at_log": "time.sleep(1)"}, "did not take"),
        ({"at_log": "os._exit(3)"}, "exit code 3"),
    ],
)
def test_a_run_neither_waits_nor_fails_nor_changes(
    misbehaving: Any,
    told: str,
    library: Any,
    train_tiny: Callable[..., Any],
    events: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library(**misbehaving)
    # Of a run that waited for its records, none would be missing however short this is.
    monkeypatch.setattr("paceline.trainer.recorder._PATIENCE_SECONDS", 2.0 if told == "did not take" else 60.0)
    alone = train_tiny("alone", RECORDS)
    watched = train_tiny("watched", {**RECORDS, "telemetry.trackers": ["wandb", "tensorboard"]})
    assert watched.status == "completed"
    assert watched.summary.weights_sha256 == alone.summary.weights_sha256
    (incident,) = events(watched.run_dir, "incident")
    assert (incident["incident"], incident["tracker"]) == ("tracker", "wandb")
    assert told in incident["message"]
    assert events(watched.run_dir)[-1]["event"] == "finish"
    without = [each for each in events(watched.run_dir) if each["event"] != "incident"]
    assert [each["event"] for each in without] == [each["event"] for each in events(alone.run_dir)]


def test_a_failed_run_says_so_soon(
    library: Any, train_tiny: Callable[..., Any], runs: Path, events: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    library(at_log="time.sleep(10**6)")
    # The launcher would end the run with its other processes long before.
    monkeypatch.setattr("paceline.trainer.recorder._PATIENCE_SECONDS", 1e4)
    changes = {**RECORDS, "telemetry.trackers": ["wandb"], "optimizer.lr": 1e30, "train.nonfinite": "stop"}
    with pytest.raises(TrainingError):
        train_tiny("run", changes)
    assert [each["status"] for each in events(runs / "run", "finish")] == ["failed"]
    assert any("did not take" in each["message"] for each in events(runs / "run", "incident"))


def test_tensorboard_cannot_fail_a_run_either(train_tiny: Callable[..., Any], runs: Path, events: Any) -> None:
    overrides = {"telemetry.trackers": ["tensorboard"]}
    stopped = train_tiny("run", {**overrides, "train.until": "2 steps"})
    for file in (stopped.run_dir / "tensorboard").iterdir():
        file.unlink()
    (stopped.run_dir / "tensorboard").rmdir()
    (stopped.run_dir / "tensorboard").write_text("in the way")
    result = train_tiny("run", overrides)
    assert result.status == "completed"
    (incident,) = events(result.run_dir, "incident")
    assert (incident["incident"], incident["tracker"]) == ("tracker", "tensorboard")
