"""A tracker can be slow, hang, raise or exit: the run neither waits nor fails, and what is missing is counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import TrainingError
from paceline.records.events import FinishEvent, StepEvent
from paceline.telemetry.async_tracker import AsyncTracker

SOURCES = Path(__file__).parents[3] / "src"


def step(number: int) -> dict[str, Any]:
    return StepEvent(step=number, epoch=1, samples=number, loss=1.0, lr=0.5).to_json()


FINISH = FinishEvent(step=9, status="completed", train_seconds=1.0, total_seconds=1.0).to_json()


class Scripted:
    """A tracker that does what it is told at each call."""

    def __init__(self, **does: Callable[[], object]) -> None:
        self.does = does
        self.calls: list[Any] = []
        does.get("make", lambda: None)()

    def write(self, events: Sequence[Mapping[str, Any]]) -> None:
        self.does.get("write", lambda: None)()
        self.calls += [each["step"] for each in events]

    def close(self, status: str) -> None:
        self.does.get("close", lambda: None)()
        self.calls.append(status)


def raises(error: BaseException) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call


@pytest.fixture
def hang() -> Any:
    """Hangs until the test is over."""
    resume = threading.Event()
    yield lambda: resume.wait(60)
    resume.set()


def fed(**does: Callable[[], object]) -> tuple[AsyncTracker, list[str]]:
    """A tracker that was given seven steps and the end, and what was reported."""
    tracker = AsyncTracker("wandb", lambda: Scripted(**does))
    return tracker, [tracker.write(each) for each in [*map(step, range(1, 8)), FINISH]]


def test_every_record_arrives_in_order_after_the_earlier_ones(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    events.write_text("".join(json.dumps(step(number)) + "\n" for number in range(1, 251)) + '{"torn')
    tool = Scripted()
    tracker = AsyncTracker("csv", lambda: tool, history=events)
    with events.open("a") as file:  # the run's writer goes on; that is no earlier record
        file.write("\n")
    for number in range(251, 601):
        assert tracker.write(step(number)) == ""
    assert [tracker.write(FINISH), tracker.close(60), tracker.close(60), tracker.write(step(1))] == [""] * 4
    assert tool.calls == [*range(1, 601), 9, "completed"]


@pytest.mark.parametrize(
    ("does", "told"),
    [
        ({"make": raises(RuntimeError("a broken build"))}, "RuntimeError: a broken build"),
        ({"write": raises(SystemExit(7))}, "SystemExit: 7"),
        ({"close": raises(OSError("no network"))}, "OSError: no network"),
        ({"write": raises(OSError("https://me:secret@host/x"))}, "//***@host/x"),
    ],
)
def test_an_error_is_reported_once(does: Any, told: str) -> None:
    tracker, messages = fed(**does)
    messages += [tracker.close(60), tracker.close(60), tracker.write(step(9))]
    (message,) = filter(None, messages)
    assert message.startswith("wandb failed: ")
    assert told in message


@pytest.mark.parametrize(("where", "message"), [("make", "8 of 8"), ("write", "8 of 8"), ("close", "did not close")])
def test_one_that_hangs_is_abandoned_and_what_it_lacks_is_counted(where: str, message: str, hang: Any) -> None:
    tracker, messages = fed(**{where: hang})
    assert messages == [""] * 8
    begin = time.monotonic()
    assert message in tracker.close(0.5)
    assert tracker.close(60) == ""  # which waits no second time
    assert time.monotonic() - begin < 10


def test_an_abandoned_one_does_nothing_more() -> None:
    resume, tool = threading.Event(), Scripted(write=lambda: resume.wait(60))
    tracker = AsyncTracker("wandb", lambda: tool)
    tracker.write(step(1))
    assert "1 of 1" in tracker.close(-5)  # another one has used up the time
    resume.set()
    assert tracker._thread is not None
    tracker._thread.join(60)
    assert tool.calls == [1]


def test_what_finds_no_room_is_counted_but_the_end_always_does(hang: Any) -> None:
    tracker = AsyncTracker("wandb", lambda: Scripted(make=hang), capacity=5)
    (message,) = filter(None, [tracker.write(step(number)) for number in range(100)])
    assert "5 records are waiting" in message
    assert tracker.write(FINISH) == ""
    assert "did not take 101 of 101 records" in tracker.close(0.1)
    assert tracker._queue.qsize() == 5 + 2


def test_an_exit_handler_that_hangs_cannot_hold_the_process() -> None:
    program = """
import atexit, sys, threading
from paceline.telemetry import async_tracker
async_tracker._LAST_SECONDS = 0.5
atexit.register(threading.Event().wait)
tracker = async_tracker.AsyncTracker("wandb", threading.Event().wait)
tracker.write({"event": "start", "step": 0})
assert tracker.close(0)
async_tracker.limit_exit(75)
sys.exit(75)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(SOURCES)}, check=False, timeout=60
    )
    assert done.returncode == 75


# ------------------------------------------------------------------------------------------------ in a run

RECORDS = {"telemetry.log_every": "1 steps", "evaluate.every": "2 steps"}

# A library of the name that misbehaves; everything of ours is the real thing.
LIBRARY = """
import sys, time
{at_import}
class Settings:
    def __init__(self, **_): pass
class Run:
    summary = {{}}
    def log(self, found, step):
        {at_log}
    def status(self): pass
    def finish(self, exit_code): pass
def init(**_):
    return Run()
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``library(at_log="raise ...")`` is what is imported as wandb."""

    def write(at_import: str = "pass", at_log: str = "pass") -> None:
        folder = tmp_path / "library" / "wandb"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(LIBRARY.format(at_import=at_import, at_log=at_log))
        monkeypatch.syspath_prepend(str(folder.parent))
        monkeypatch.delitem(sys.modules, "wandb", raising=False)

    return write


@pytest.mark.parametrize(
    ("misbehaving", "message"),
    [
        ({"at_import": "raise RuntimeError('a broken build')"}, "a broken build"),
        ({"at_log": "time.sleep(60)"}, "did not take"),
        ({"at_log": "sys.exit(3)"}, "SystemExit: 3"),
    ],
)
def test_a_run_neither_waits_nor_fails_nor_changes(
    misbehaving: Any,
    message: str,
    library: Any,
    train_tiny: Callable[..., Any],
    events: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library(**misbehaving)
    monkeypatch.setattr("paceline.trainer.recorder._PATIENCE_SECONDS", 15.0 if message == "did not take" else 60.0)
    alone = train_tiny("alone", RECORDS)
    begin = time.monotonic()
    watched = train_tiny("watched", {**RECORDS, "telemetry.trackers": ["wandb", "tensorboard"]})
    assert time.monotonic() - begin < 50
    assert watched.status == "completed"
    assert watched.summary.weights_sha256 == alone.summary.weights_sha256
    (incident,) = events(watched.run_dir, "incident")
    assert (incident["incident"], incident["tracker"]) == ("tracker", "wandb")
    assert message in incident["message"]
    assert events(watched.run_dir)[-1]["event"] == "finish"
    without = [each for each in events(watched.run_dir) if each["event"] != "incident"]
    assert [each["event"] for each in without] == [each["event"] for each in events(alone.run_dir)]


def test_a_failed_run_ends_soon(
    library: Any, train_tiny: Callable[..., Any], runs: Path, events: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    library(at_log="time.sleep(60)")
    # The launcher would end the run with its other processes long before.
    monkeypatch.setattr("paceline.trainer.recorder._PATIENCE_SECONDS", 1e4)
    changes = {**RECORDS, "telemetry.trackers": ["wandb"], "optimizer.lr": 1e30, "train.nonfinite": "stop"}
    with pytest.raises(TrainingError):
        train_tiny("run", changes)
    assert [each["status"] for each in events(runs / "run", "finish")] == ["failed"]
    assert any("did not take" in each["message"] for each in events(runs / "run", "incident"))


@pytest.mark.parametrize("name", ["tensorboard", "csv"])
def test_files_that_cannot_be_written_are_reported(
    name: str, train_tiny: Callable[..., Any], runs: Path, events: Any
) -> None:
    train_tiny("run", {"train.until": "2 steps"})
    (runs / "run" / name).write_text("in the way")
    result = train_tiny("run", {"telemetry.trackers": [name]})
    assert result.status == "completed"
    (incident,) = events(result.run_dir, "incident")
    assert (incident["incident"], incident["tracker"]) == ("tracker", name)
