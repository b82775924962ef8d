"""Events keep the keys of the interface and survive kills and resumes without gaps or repeats."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import RunDirectoryError
from paceline.records.events import (
    CheckpointEvent,
    EvaluationEvent,
    Event,
    EventWriter,
    FinishEvent,
    IncidentEvent,
    MeasurementEvent,
    ObservationEvent,
    ProfileEvent,
    ResumeEvent,
    StartEvent,
    StepEvent,
    StopEvent,
    truncate_after,
)
from paceline.records.reader import read_events, read_for_report

TIMINGS = {"step_seconds": 0.1, "data_wait_seconds": 0.01, "throughput_samples_per_second": None}


def step_event(step: int) -> StepEvent:
    return StepEvent(step=step, epoch=1, samples=32 * step, loss=1 / (step + 1), lr=0.1, timings=TIMINGS)


def test_step_record_has_the_keys_of_the_interface() -> None:
    document = StepEvent(
        step=3,
        time=5.0,
        epoch=1,
        samples=96,
        loss=0.5,
        lr=0.1,
        grad_norm=2.0,
        timings=TIMINGS,
        metrics={"mlm": 1.0},
    ).to_json()
    assert document == {
        "event": "step",
        "step": 3,
        "time": 5.0,
        "epoch": 1,
        "samples": 96,
        "loss": 0.5,
        "lr": 0.1,
        "grad_norm": 2.0,
        "grad_scale": None,
        **TIMINGS,
        "mlm": 1.0,
    }
    assert list(document)[:3] == ["event", "step", "time"]


def test_evaluation_record_has_the_keys_of_the_interface() -> None:
    metrics = {"loss": 0.3, "top1_accuracy": 97.5, "top5_accuracy": 99.9}
    document = EvaluationEvent(
        step=9, epoch=2, split="validation", weights="ema", samples=360, seconds=0.2, metrics=metrics
    ).to_json()
    assert {
        "event",
        "step",
        "split",
        "weights",
        "samples",
        "loss",
        "top1_accuracy",
        "top5_accuracy",
    } <= document.keys()


def test_every_kind_can_be_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventWriter(path) as writer:
        writer.append(StartEvent(step=0, recipe="digits", world_size=2, total_steps=10, version="0.1.0"))
        writer.append(ResumeEvent(step=0, checkpoint="step-00000000", resumes=1, world_size=2))
        writer.append(step_event(1))
        writer.append(EvaluationEvent(step=1, epoch=1, split="validation", weights="model", samples=7, seconds=0.1))
        writer.append(ObservationEvent(step=1, split="train", details={"losses": {}}))
        writer.append(CheckpointEvent(step=1, checkpoint="step-00000001"))
        writer.append(ProfileEvent(step=1, first_step=1, last_step=1, tool="torch", folder="profile/step-00000000"))
        writer.append(IncidentEvent(step=1, incident="broken_sample", message="…", details={"path": tmp_path}))
        writer.append(MeasurementEvent(step=0, what="compile", message="…", seconds=1.0, metrics={"speedup": 1.2}))
        writer.append(StopEvent(step=1, reason="SIGTERM"))
        writer.append(FinishEvent(step=1, status="stopped", train_seconds=1.0, total_seconds=2.0))
        writer.append({"event": "own", "step": 1, "loss": math.inf})
    events = list(read_events(path))
    assert sorted(event["event"] for event in events) == sorted(
        [*(kind.kind for kind in Event.__subclasses__()), "own"]
    )
    assert events[-1]["loss"] is None
    assert [event["step"] for event in read_events(path, kinds=("step",))] == [1]
    assert all(event["time"] > 1e9 for event in events[:-1])


def test_of_very_many_records_a_report_reads_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    with EventWriter(path) as writer:
        for step in range(1, 102):
            writer.append(step_event(step))
            if step % 20 == 0:
                writer.append(CheckpointEvent(step=step, checkpoint=f"step-{step:08}"))
        writer.append(FinishEvent(step=101, status="completed", train_seconds=1.0, total_seconds=2.0))
    assert read_for_report(path) == (list(read_events(path)), ())
    monkeypatch.setattr("paceline.records.reader.MAX_STEP_RECORDS", 30)
    found, notes = read_for_report(path)
    assert notes == ("Of 101 step records, one in 4 is used.",)
    assert [each["step"] for each in found if each["event"] == "step"] == [*range(4, 101, 4), 101]
    assert [each["step"] for each in found if each["event"] == "checkpoint"] == [20, 40, 60, 80, 100]
    assert [each["event"] for each in found[-2:]] == ["step", "finish"]
    assert sorted(found, key=lambda each: each["time"]) == found


def test_metrics_cannot_hide_a_key() -> None:
    with pytest.raises(ValueError, match=r"step events have keys \['lr'\] already: rename these metrics"):
        StepEvent(step=1, epoch=1, samples=1, loss=0.0, lr=0.1, metrics={"lr": 1.0}).to_json()


def test_what_is_no_event_is_refused(tmp_path: Path) -> None:
    with (
        EventWriter(tmp_path / "events.jsonl") as writer,
        pytest.raises(ValueError, match="'event' and 'step'"),
    ):
        writer.append({"event": "step"})


def test_truncation_then_writing_again_gives_the_uninterrupted_file(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    events = [step_event(step).to_json() for step in range(1, 21)]
    with EventWriter(whole) as writer:
        for event in events:
            writer.append(event)
    for kept in range(21):
        cut.write_bytes(whole.read_bytes())
        assert truncate_after(cut, kept) == 20 - kept
        with EventWriter(cut) as writer:
            for event in events[kept:]:
                writer.append(event)
        assert cut.read_bytes() == whole.read_bytes()


def test_truncation_drops_a_torn_line_and_leaves_an_intact_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert truncate_after(path, 5) == 0
    assert not path.exists()
    with EventWriter(path) as writer:
        writer.append(step_event(1))
        writer.append(step_event(2))
    whole = path.read_bytes()
    inode = path.stat().st_ino
    assert truncate_after(path, 2) == 0
    assert path.stat().st_ino == inode
    for torn in (b"{", whole.splitlines()[0], b'{"event": "st'):
        path.write_bytes(whole + torn)
        assert [event["step"] for event in read_events(path)] == [1, 2]
        assert truncate_after(path, 2) == 1
        assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "damage",
    [
        b"\x00\x00\x00\n",
        b"[1]\n",
        b'{"event": "step"}\n',
        b'{"event": "step", "st\n',
        b'{"event": "step", "step": 1, "position": null}\n',
    ],
)
def test_damage_in_the_middle_is_named(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "events.jsonl"
    good = json.dumps(step_event(1).to_json()).encode() + b"\n"
    path.write_bytes(good + damage + good)
    with pytest.raises(RunDirectoryError, match=r"Line 2 of '.*events.jsonl' is not an event"):
        list(read_events(path))
    with pytest.raises(RunDirectoryError, match="Line 2"):
        truncate_after(path, 0)
    assert path.read_bytes() == good + damage + good


def test_a_killed_writer_loses_nothing_it_had_flushed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from paceline.records.events import EventWriter\n"
        "writer = EventWriter(Path(sys.argv[1]))\n"
        "for step in range(1, 10**9):\n"
        "    writer.append({'event': 'step', 'step': step, 'filler': 'x' * (step % 300)})\n"
        "    if step % 100 == 0:\n"
        "        writer.flush(durable=step % 1000 == 0)\n"
        "        print(step, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        flushed = max(int(writer.stdout.readline()) for _ in range(30))
        os.kill(writer.pid, signal.SIGKILL)
    steps = [event["step"] for event in read_events(path)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= flushed


def test_an_unwritable_path_is_told(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    with pytest.raises(RunDirectoryError, match="Cannot open the file"):
        EventWriter(tmp_path / "a file" / "events.jsonl")
    with pytest.raises(RunDirectoryError, match="Cannot read the file"):
        list(read_events(tmp_path / "events.jsonl"))
