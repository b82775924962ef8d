"""The records of two processes name the one that the other waits for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from calls import Call
from own_networks import OWN, network_that

pytestmark = pytest.mark.world_size(2)

SLUGGISH = network_that('time.sleep(0.6 if os.environ["RANK"] == os.environ["SLOW"] else 0.05)')
TRAIN = (
    *("train", "recipe.yaml", "model.name=sluggish:Net", *OWN),
    *("train.duration=10 steps", "telemetry.log_every=2 steps", "evaluate.every=off", "checkpoint.every=off"),
    *("batch.micro_size=auto", "batch.global_size=10", "--processes", "2", "--run-dir"),
)


@pytest.mark.thorough
def test_the_expected_time_includes_the_wait_for_others(studio: Path, run: Call) -> None:
    (studio / "late.py").write_text(network_that('time.sleep(0.1 if os.environ["RANK"] == "1" else 0)'))
    more = ("model.name=late:Net", "train.duration=20 steps", "parallel.exact=false")
    run(*TRAIN, studio / "late", *more, where=studio).ended(0)
    events = [json.loads(line) for line in (studio / "late" / "events.jsonl").read_text().splitlines()]
    (expected,) = [event["expected_seconds"] for event in events if event.get("what") == "forecast"]
    assert expected > 20 * 0.1


@pytest.mark.thorough
@pytest.mark.parametrize(("rank", "exact"), [pytest.param(0, "true", marks=pytest.mark.thorough), (1, "false")])
def test_a_slow_rank_is_named(studio: Path, run: Call, rank: int, exact: str) -> None:
    (studio / "sluggish.py").write_text(SLUGGISH)
    run_dir = studio / f"slow-{rank}"
    more = (f"parallel.exact={exact}", *(["parallel.logical_ranks=2"] if exact == "true" else []))
    run(*TRAIN, run_dir, *more, where=studio, variables={"SLOW": str(rank)}).ended(0)
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    assert len(steps) == 5
    for step in steps:
        assert (step["slowest_rank"], step["slowest_phase"]) == (rank, "forward")
        assert step["slowest_factor"] > 1.5
    (incident,) = [event for event in events if event.get("incident") == "slow_rank"]
    assert (incident["rank"], incident["phase"], incident["step"]) == (rank, "forward", 6)
