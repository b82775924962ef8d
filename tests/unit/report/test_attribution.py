"""Records are put together in proportion to their steps, old ones are read, and a sentence needs clear evidence."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from paceline.reports.attribution import attribute_run

from paceline.errors import RunDirectoryError
from paceline.telemetry.meter import PHASES

PLAN = {"device": "cpu", "strategy": "single", "data": {"backend": "pytorch", "workers": 3}}
COMPUTING = {"forward": 0.03, "backward": 0.06, "data_wait": 0.004, "optimizer": 0.006}


def start(step: int, world_size: int = 1) -> dict[str, Any]:
    return {"event": "start", "step": step, "position": step, "world_size": world_size}


def record(step: int, phases: Mapping[str, float] = COMPUTING, **more: Any) -> dict[str, Any]:
    seconds = {f"{phase}_seconds": phases.get(phase, 0.0) for phase in PHASES}
    rates = {"step_seconds": sum(phases.values()), "throughput_samples_per_second": 100.0}
    return {"event": "step", "step": step, "position": step, **seconds, **rates, **more}


def write(folder: Path, events: Sequence[Mapping[str, Any]], plan: Mapping[str, Any] = PLAN) -> Path:
    (folder / "recipe.yaml").write_text("task: image_classification\n")
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    return folder


def test_means_are_over_steps_and_not_over_records(tmp_path: Path) -> None:
    long, short = {"forward": 0.1}, {"forward": 0.3, "host": 0.1}
    # Of the first ten, three are warm-up; the last record is about two steps.
    found = attribute_run(write(tmp_path, [start(0), record(10, long), record(20, long), record(22, short)]))
    assert (found.records, found.steps) == (3, 7 + 10 + 2)
    assert found.step_seconds == pytest.approx((17 * 0.1 + 2 * 0.4) / 19)
    assert found.median_step_seconds == 0.1
    phases = {each.name: each for each in found.phases}
    assert list(phases) == list(PHASES)
    assert phases["host"].seconds == pytest.approx(2 * 0.1 / 19)
    assert sum(each.share for each in found.phases) == pytest.approx(1)
    assert found.notes == ()


def test_records_of_nothing_but_warm_up_count_only_where_there_are_no_others(tmp_path: Path) -> None:
    slow = record(2, {"forward": 9.0}, throughput_samples_per_second=None)
    assert attribute_run(write(tmp_path, [start(0), slow, record(4), record(6)])).steps == 2 - 1 + 2
    assert attribute_run(write(tmp_path, [start(0), slow])).step_seconds == 9.0


def test_a_launch_with_other_processes_begins_anew(tmp_path: Path) -> None:
    events = [start(0, 2), record(10, {"forward": 9.0}), start(10), record(20), start(20), record(30)]
    found = attribute_run(write(tmp_path, events))
    assert (found.world_size, found.records, found.steps) == (1, 2, 14)
    assert found.step_seconds == pytest.approx(0.1)


def test_what_could_not_be_told_is_said(tmp_path: Path) -> None:
    untold = {"communication_seconds": None, "h2d_seconds": None}
    events = [start(0), *(record(step, {"forward": 0.3, "backward": 0.6}, **untold) for step in (10, 20, 30))]
    found = attribute_run(write(tmp_path, events, PLAN | {"strategy": "fsdp"}))
    assert {"communication", "h2d"}.isdisjoint(each.name for each in found.phases)
    assert len(found.notes) == 2
    assert found.bottleneck is None  # nine tenths are passes, but who knows how much of them is waiting


def late(step: int, factor: float = 1.8, rank: int = 2) -> dict[str, Any]:
    waits = {"minimum": 0.0, "median": 0.02, "maximum": 0.03, "least_rank": rank, "most_rank": 0}
    slowest = {"slowest_rank": rank, "slowest_phase": "data_wait", "slowest_factor": factor}
    return record(step, COMPUTING | {"communication": 0.02}, rank_seconds={"communication": waits}, **slowest)


def test_who_waits_for_whom(tmp_path: Path) -> None:
    found = attribute_run(write(tmp_path, [start(0, 4), *(late(step) for step in (10, 20, 30, 40))]))
    assert found.waiting is not None
    assert (found.waiting.rank, found.waiting.phase, found.waiting.waiting_rank) == (2, "data_wait", 0)
    assert found.waiting.waiting_share == pytest.approx(0.03 / 0.12)
    assert "25% of a step of rank 0 is spent waiting for rank 2" in str(found.bottleneck)
    document = json.loads(json.dumps(found.to_json()))
    assert document["phases"]["communication"]["over_ranks"]["maximum"] == pytest.approx(0.03)
    assert document["waiting"]["factor"] == 1.8


@pytest.mark.parametrize(
    "records",
    [[late(10, 1.1), late(20, 1.1), late(30, 1.1)], [late(10), late(20, rank=1), late(30, rank=3), late(40)]],
    ids=["hardly slower", "another one each time"],
)
def test_nobody_is_blamed_without_evidence(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    found = attribute_run(write(tmp_path, [start(0, 4), *records]))
    assert found.waiting is None
    assert str(found.bottleneck).startswith("communication: 17% of a step waits for the exchange")


@pytest.fixture
def said_of(tmp_path: Path) -> Callable[..., str | None]:
    """``said_of(phases, lags, plan)``: what steps of these phases are bound by."""

    def say(phases: Sequence[Mapping[str, float]], lags: Sequence[float] = (), plan: Any = PLAN) -> str | None:
        events = [start(0), *(record(10 * at, each) for at, each in enumerate(phases, 1))]
        for event, lag in zip(events[1:], lags, strict=False):
            launched = {f"launch_{phase}_seconds": event[f"{phase}_seconds"] for phase in PHASES}
            event.update(launched, device_lag_seconds=lag * event["step_seconds"])
        return attribute_run(write(tmp_path, events, plan)).bottleneck

    return say


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ({"data_wait": 0.41, "h2d": 0.2, "forward": 0.39}, "data: 41% of a step waits for batches; use more than"),
        ({"h2d": 0.2, "forward": 0.3, "backward": 0.5}, "data: 20% of a step is spent on normalising"),
        ({"communication": 0.3, "forward": 0.3, "backward": 0.4}, "communication: 30%"),
        ({"optimizer": 0.4, "forward": 0.3, "backward": 0.3}, "optimizer: 40%"),
        ({"ema": 0.15, "forward": 0.35, "backward": 0.5}, "moving average: it takes 15%"),
        ({"logging": 0.06, "forward": 0.44, "backward": 0.5}, "logging: 6%"),
        ({"host": 0.2, "forward": 0.3, "backward": 0.5}, "host: 20%"),
        ({"forward": 0.3, "backward": 0.6, "host": 0.1}, "computing: forward and backward passes take 90%"),
    ],
)
def test_the_sentence_names_the_largest_avoidable_part(said_of: Any, phases: dict[str, float], message: str) -> None:
    answer = str(said_of([phases] * 4))
    assert (answer.startswith(message), answer[-1]) == (True, ".")


def test_a_pipeline_of_ones_own_has_no_key_to_change(said_of: Any) -> None:
    message = str(said_of([{"data_wait": 0.41, "forward": 0.59}] * 4, plan=PLAN | {"data": {}}))
    assert "open_pipeline" in message
    assert "data.workers" not in message


def test_no_sentence_without_clear_evidence(said_of: Any) -> None:
    slow, quick = {"data_wait": 0.5, "forward": 0.5}, {"data_wait": 0.02, "forward": 0.73, "optimizer": 0.25}
    assert said_of([slow] * 2) is None  # two records are none
    assert said_of([quick, quick, slow, slow]) is None
    assert said_of([quick] * 4) is None


def test_a_device_that_is_never_behind_waits_for_launches(said_of: Any) -> None:
    computing = [{"forward": 0.4, "backward": 0.5}] * 4
    assert str(said_of(computing, lags=[0.01, 0.02, 0.0, 0.03])).startswith("launching: ")
    assert str(said_of(computing, lags=[0.8, 0.9, 0.0, 0.7])).startswith("computing: ")
    assert str(said_of([{"data_wait": 0.4, "forward": 0.6}] * 4, lags=[0.0] * 4)).startswith("data: ")


def test_a_run_without_a_record_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no step record yet"):
        attribute_run(write(tmp_path, [start(0)]))
