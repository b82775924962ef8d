"""Tables hold what events.jsonl holds, in columns that keep their places, after kills and resumes too."""

from __future__ import annotations

import csv
import json
import time
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from paceline.records.events import EvaluationEvent, EventWriter, IncidentEvent, StepEvent, truncate_after
from paceline.telemetry.async_tracker import AsyncTracker
from paceline.telemetry.trackers import CsvTracker


def step(number: int, **more: Any) -> dict[str, Any]:
    return StepEvent(step=number, position=number, epoch=1, samples=number, loss=1 / number, lr=0.5, **more).to_json()


def table(folder: Path, kind: str) -> list[dict[str, str]]:
    with (folder / f"{kind}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


class Launch:
    """Writes to the file and to the tables, as a run does."""

    def __init__(self, run: Path) -> None:
        self._tracker = AsyncTracker("csv", lambda: CsvTracker(run / "csv"), history=run / "events.jsonl")
        self._writer = EventWriter(run / "events.jsonl")

    def write(self, events: Iterable[dict[str, Any]]) -> None:
        """Write events, and wait for the tables."""
        for event in events:
            self._writer.append(event)
            assert self._tracker.write(event) == ""
        self._writer.flush()
        deadline = time.monotonic() + 60
        while self._tracker._delivered < self._tracker._accepted and time.monotonic() < deadline:
            time.sleep(0.01)

    def close(self) -> None:
        self._writer.close()
        assert self._tracker.close(60) == ""


def test_each_kind_has_a_table(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    scored = EvaluationEvent(step=2, epoch=1, split="validation", weights="ema", samples=7, seconds=0.5)
    launch.write(
        [step(1), step(2), scored.to_json(), IncidentEvent(step=2, incident="x", message='a "b", c').to_json()]
    )
    # Readable before it is closed.
    assert [row["step"] for row in table(tmp_path / "csv", "step")] == ["1", "2"]
    assert table(tmp_path / "csv", "incident")[0]["message"] == 'a "b", c'
    head = (tmp_path / "csv" / "evaluation.csv").read_text().splitlines()[0]
    assert head == "step,time,epoch,samples,split,weights,seconds,train_seconds"
    launch.close()


def test_a_number_that_comes_later_is_a_last_column(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    launch.write([step(1, details={"long": "x" * 200_000}), step(2)])
    before = (tmp_path / "csv" / "step.csv").read_text().splitlines()
    seconds = {"minimum": 1.0, "rank": 0}
    launch.write([step(3, metrics={"mfu": 0.5}, details={"rank_seconds": {"forward": seconds}}), step(4)])
    after = (tmp_path / "csv" / "step.csv").read_text().splitlines()
    assert [line.removesuffix(",,,") for line in after[1:3]] == before[1:3]
    assert after[0] == f"{before[0]},mfu,rank_seconds.forward.minimum,rank_seconds.forward.rank"
    rows = table(tmp_path / "csv", "step")
    assert [row["mfu"] for row in rows] == ["", "", "0.5", ""]
    assert [row["loss"] for row in rows] == [str(1 / number) for number in (1, 2, 3, 4)]
    launch.close()


def test_a_long_run_goes_on_without_being_in_memory(tmp_path: Path) -> None:
    number = 3000
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(step(each)) + "\n" for each in range(1, number + 1)))
    launch = Launch(tmp_path)
    tracemalloc.start()
    try:
        launch.write([step(number + 1), step(number + 2, metrics={"mfu": 0.5})])  # a new column
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        launch.close()
    assert len(table(tmp_path / "csv", "step")) == number + 2
    assert peak < 500_000


@pytest.mark.parametrize("back_to", [0, 2])
def test_a_run_that_was_killed_goes_on_without_gaps_or_repeats(tmp_path: Path, back_to: int) -> None:
    first = Launch(tmp_path)
    first.write(
        [step(1), step(2), step(3, metrics={"mfu": 0.5}), IncidentEvent(step=3, incident="x", message="y").to_json()]
    )
    # Killed here, in the middle of a row.
    with (tmp_path / "csv" / "step.csv").open("a") as file:
        file.write("4,4,17")
    truncate_after(tmp_path / "events.jsonl", back_to)
    second = Launch(tmp_path)
    second.write(step(number) for number in range(back_to + 1, 6))
    assert [row["step"] for row in table(tmp_path / "csv", "step")] == ["1", "2", "3", "4", "5"]
    assert not (tmp_path / "csv" / "incident.csv").exists()
    second.close()
    first.close()


def test_one_that_is_asked_for_later_has_all_that_was_before(tmp_path: Path) -> None:
    with EventWriter(tmp_path / "events.jsonl") as writer:
        writer.append(step(1))
    launch = Launch(tmp_path)
    launch.write([step(2)])
    assert [row["step"] for row in table(tmp_path / "csv", "step")] == ["1", "2"]
    launch.close()


def test_of_a_real_run_they_are_the_events(
    train_tiny: Callable[..., Any], events: Callable[..., list[dict[str, Any]]]
) -> None:
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    train_tiny("a", {"telemetry.trackers": ["csv"], "train.until": "5 steps"})
    run = train_tiny("a", {"telemetry.trackers": ["csv"]}).run_dir
    recorded = events(run)
    kinds = {each["event"] for each in recorded}
    assert {path.stem for path in (run / "csv").iterdir()} == kinds >= {"start", "resume", "step", "evaluation"}
    for kind in kinds:
        frame = pandas.read_csv(run / "csv" / f"{kind}.csv")
        expected = [each for each in recorded if each["event"] == kind]
        assert len(frame) == len(expected)
        for row, each in zip(frame.to_dict("records"), expected, strict=True):
            flat = {key: value for key, value in each.items() if key != "event" and not isinstance(value, dict)}
            for key, value in flat.items():
                # Where some rows have no value, pandas reads whole numbers as fractions; lists are read as text.
                read = type(value)(row[key]) if row[key] == value else row[key]
                assert (value is None and read != read) or json.dumps(value) in (json.dumps(read), read), key
