"""Who watches a run sees what its events say, whole, once, and after they were cut back as they are then."""

from __future__ import annotations

import contextlib
import io
import json
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline.errors import RunDirectoryError
from paceline.records import events as records
from paceline.reports.attribution import attribute_run
from paceline.reports.html.page import write_report
from paceline_ops.watch.screen import EventFollower, WatchedRun, draw_chart, exit_line, line_of, row, screen, table


def step(number: int, loss: float = 1.0, **more: Any) -> records.StepEvent:
    timings = {"step_seconds": 0.5, "data_wait_seconds": 0.1, "forward_seconds": 0.4}
    return records.StepEvent(step=number, epoch=1, samples=number, loss=loss, lr=0.5, timings=timings, **more)


def numbers(events: list[dict[str, Any]]) -> list[int]:
    return [event["step"] for event in events]


# ----------------------------------------------------------------------------------------- following


def test_each_event_is_read_once_and_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    follower = EventFollower(path)
    assert follower.read() == (False, [])
    lines = [json.dumps(step(number).to_json()) + "\n" for number in range(1, 4)]
    content, seen = "".join(lines), []
    with path.open("w") as file:
        for letter in content:
            file.write(letter)
            file.flush()
            is_cut, events = follower.read()
            assert not is_cut
            seen += numbers(events)
    assert seen == [1, 2, 3]


def test_a_line_whose_text_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    """As a network's file system shows it: the length first, and zeros."""
    path = tmp_path / "events.jsonl"
    complete = [json.dumps(step(number).to_json()).encode() + b"\n" for number in (1, 2)]
    path.write_bytes(complete[0] + b"\0" * (len(complete[1]) - 1) + b"\n")
    follower = EventFollower(path)
    assert numbers(follower.read()[1]) == [1]
    path.write_bytes(b"".join(complete))
    assert follower.read()[0] is False
    path.write_bytes(b"".join(complete))
    assert follower.read() == (False, [])


@pytest.mark.parametrize("more", [0, 1, 5])
def test_a_file_that_is_cut_back_is_read_anew(more: int, tmp_path: Path) -> None:
    """By a resume; meanwhile it may have grown beyond where it was."""
    path = tmp_path / "events.jsonl"
    with records.EventWriter(path) as writer:
        for number in (1, 2, 3, 4):
            writer.append(step(number, time=1.0))
    follower = EventFollower(path)
    assert numbers(follower.read()[1]) == [1, 2, 3, 4]
    records.truncate_after(path, 2)
    with records.EventWriter(path) as writer:
        for number in range(3, 3 + more):
            writer.append(step(number, time=2.0))
    is_cut, events = follower.read()
    assert is_cut
    assert numbers(events) == [1, 2, *range(3, 3 + more)]
    assert follower.read() == (False, [])


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("no event\n")
    with pytest.raises(RunDirectoryError, match=r"Line 1 of .*events.jsonl"):
        EventFollower(path).read()


# ----------------------------------------------------------------------------------------- the run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("seed: 1\n")
    (tmp_path / "run" / "plan.json").write_text('{"total_epochs": 2.5, "total_steps": 10}')
    return tmp_path / "run"


def write(run: Path, *events: Any) -> None:
    with records.EventWriter(run / "events.jsonl") as writer:
        for event in events:
            writer.append(event)


START = records.StartEvent(step=0, recipe="digits", world_size=1, total_steps=10, version="1")


def test_progress_pace_phases_and_results(run: Path) -> None:
    watched = WatchedRun(run)
    watched.look()
    assert (watched.state, watched.step, watched.total_steps) == ("starting", 0, 10)
    now = time.time()
    write(run, START, *(step(number, time=now - 50 + 10 * number) for number in (1, 2, 3, 4, 5)))
    watched.look()
    assert (watched.state, watched.step, watched.record["epoch"], watched.epochs) == ("running", 5, 1, 3)
    assert watched.seconds_left == pytest.approx(50, abs=5)
    assert watched.phases() == pytest.approx({"data_wait": 0.2, "forward": 0.8})
    for weights, accuracy in (("model", 10.0), ("ema", 20.0)):
        scores = {"loss": 1.0, "top1_accuracy": accuracy}
        facts = {"split": "validation", "weights": weights, "samples": 7, "seconds": 1.0, "metrics": scores}
        write(run, records.EvaluationEvent(step=5, epoch=1, **facts))
    write(run, records.IncidentEvent(step=5, incident="slow_rank", message="rank 1 is slow"))
    lines = [line_of(event, watched) for event in watched.look()]
    assert watched.curve("top1_accuracy", evaluations=True) == [(5, 20.0)]
    assert lines[-1] == "step 5  slow rank: rank 1 is slow"
    assert row(watched)[5] == "top-1 20.00 %"
    write(run, records.FinishEvent(step=10, status="completed", train_seconds=1.0, total_seconds=1.0))
    watched.look()
    assert (watched.state, watched.is_over, watched.seconds_left) == ("completed", True, None)
    # It may be made longer, and goes on.
    write(run, START)
    watched.look()
    assert watched.state == "running"


def test_the_last_line_says_why_a_run_did_not_learn(run: Path) -> None:
    write(run, START, records.FinishEvent(step=10, status="completed", train_seconds=1.0, total_seconds=1.0))
    watched = WatchedRun(run)
    watched.look()
    ending = exit_line(watched)
    assert "\n" not in ending
    (run / "summary.json").write_text(json.dumps({"details": {"warning": "It diverged; lower the rate."}}))
    assert exit_line(watched) == f"{ending}\n  It diverged; the records do not show why."


def test_checkpoints_are_those_that_are_still_there(run: Path) -> None:
    names = [f"step-{number:08d}" for number in (1, 2)]
    write(run, *(records.CheckpointEvent(step=number, checkpoint=name) for number, name in enumerate(names, 1)))
    (run / "checkpoints" / names[1]).mkdir(parents=True)
    watched = WatchedRun(run)
    watched.look()
    assert watched.to_json()["checkpoints"] == names[1:]


def test_a_run_without_a_word_is_gone_only_where_that_is_certain(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl
    import socket

    write(run, START, step(1, time=time.time() - 1000))
    (run / ".lock").touch()

    def state(host: str) -> str:
        (run / "environment.json").write_text(json.dumps({"host": host}))
        watched = WatchedRun(run)
        watched.look()
        return watched.state

    assert state(socket.gethostname()) == "gone"
    assert state("another") == "running"
    with (run / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert state(socket.gethostname()) == "running"


# ----------------------------------------------------------------------------------------- curves


def test_names_with_brackets_are_shown_as_they_are(tmp_path: Path) -> None:
    names = ("lr[0.1]", "a[/b]", "[red]c")  # the second is a folder in a folder
    for name in names:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "recipe.yaml").write_text("data: {}\n")
    watched = [WatchedRun(tmp_path / name) for name in names]
    console = Console(width=140, height=40, file=io.StringIO(), record=True)
    console.print(table(watched))
    for each in watched:
        console.print(screen(each, console))
    shown = console.export_text()
    assert all(shown.count(name) == 2 for name in names)


def test_a_curve_is_drawn_from_its_left_to_its_right() -> None:
    falling = draw_chart([(0, 4.0), (1, 3.0), (2, 2.0), (3, 1.0)], width=10, height=4)
    rows = [[letter != "\u2800" for letter in line[2:]] for line in falling[:4]]
    first = [line.index(True) for line in rows]
    assert first == sorted(first)
    assert (rows[0][0], rows[-1][-1]) == (True, True)
    assert all(any(line[column] for line in rows) for column in range(8))
    assert (falling[0][0], falling[3][0]) == ("4", "1")


@pytest.mark.parametrize("points", [[(1, 2.0)], [(1, 2.0), (2, 2.0)], [(1, float("nan")), (2, 1.0)], []])
def test_few_points_are_no_error(points: Any) -> None:
    assert draw_chart(points, width=30, height=3)


UNLIKELY = [0, -1, 1e308, -1e308, 10**18, 10**400, "x", None, [], {}, {"forward": 1}, True, float("inf")]
KEYS = {
    "start": ("world_size", "total_steps", "time"),
    "step": (
        *("loss", "lr", "epoch", "samples", "step_seconds", "forward_seconds", "data_wait_fraction", "time"),
        *("throughput_samples_per_second", "rank_seconds", "slowest_rank", "slowest_phase", "slowest_factor"),
    ),
    "evaluation": ("loss", "epoch", "seconds", "weights"),
    "finish": ("status", "total_seconds"),
}


@pytest.mark.parametrize(("kind", "key"), [(kind, key) for kind, keys in KEYS.items() for key in keys])
def test_unlikely_values_are_shown_or_refused(
    tmp_path: Path, recorded_run: Any, write: Any, kind: str, key: str
) -> None:
    spread = dict.fromkeys(("minimum", "median", "maximum", "most_rank"), 1)
    slow = {"slowest_rank": 1, "slowest_phase": "forward", "slowest_factor": 2.0}
    ranks = {"rank_seconds": dict.fromkeys(("forward", "communication"), spread), **slow}
    told = recorded_run(2).start().record(1, **ranks).record(2, **ranks).record(3, **ranks)
    told.evaluation(3, loss=1.0).finish(3)
    run = write(tmp_path / "run", told)
    console = Console(file=io.StringIO(), width=120, height=40)
    for value in UNLIKELY:
        events = [{**each, key: value} if each["event"] == kind else each for each in told.events]
        (run / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))

        def watch() -> None:
            watched = WatchedRun(run)
            lines = [line_of(each, watched) for each in watched.look()]
            console.print(screen(watched, console), table([watched]), *filter(None, lines), exit_line(watched))

        for show in (watch, lambda: write_report([run]), lambda: attribute_run(run).__paceline__()):
            with contextlib.suppress(RunDirectoryError):
                show()


@pytest.mark.parametrize("kind", ["a named pipe", "a socket", "a device", "Is a directory"])
def test_a_log_of_events_that_is_no_file_is_refused(tmp_path: Path, recorded_run: Any, write: Any, kind: str) -> None:
    run = write(tmp_path / "run", None)
    events = run / "events.jsonl"
    make: dict[str, Callable[[], object]] = {
        "a named pipe": lambda: os.mkfifo(events),
        "a socket": lambda: os.mknod(events, stat.S_IFSOCK),
        "a device": lambda: events.symlink_to("/dev/zero"),
        "Is a directory": events.mkdir,
    }
    make[kind]()
    for show in (lambda: write_report([run]), lambda: attribute_run(run), lambda: WatchedRun(run).look()):
        with pytest.raises(RunDirectoryError, match=rf"events\.jsonl'.* {kind}"):
            show()
