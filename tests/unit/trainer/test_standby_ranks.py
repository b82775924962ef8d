"""Who trains where nodes come and go, and how long those wait that do not."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.distributed.environment import LaunchEnvironment
from paceline.host.world import World
from paceline.recipe.load import load_recipe
from paceline.records.events import Status
from paceline.records.reader import Summary
from paceline.records.run_directory import write_json
from paceline.trainer.train import elastic_notices, wait_for_training, without_standby_ranks

EIGHT_PARTS = load_recipe("digits", ["parallel.exact=true"]).recipe


def launch(rank: int, size: int, *, per_node: int = 1, comes_again: str | None = "--nnodes=1:9") -> LaunchEnvironment:
    world = World(rank=rank, world_size=size, local_rank=rank % per_node, local_world_size=per_node)
    return LaunchEnvironment(world, "env://", "torchrun", restart_setting=comes_again)


@pytest.mark.parametrize(("size", "trains"), [(1, 1), (2, 2), (3, 2), (4, 4), (5, 4), (7, 4), (8, 8), (9, 8)])
def test_as_many_train_as_can_share_the_batch(size: int, trains: int) -> None:
    for rank in range(size):
        found = without_standby_ranks(launch(rank, size), EIGHT_PARTS)
        if rank >= trains:
            assert found is None
            continue
        assert found is not None
        assert (found.world.rank, found.world.world_size) == (rank, trains)


def test_a_machine_of_which_a_part_trains() -> None:
    found = without_standby_ranks(launch(3, 6, per_node=3), EIGHT_PARTS)
    assert found is not None
    assert found.world == World(rank=3, world_size=4, local_rank=0, local_world_size=1)


@pytest.mark.parametrize("fixed", [None, "--max-restarts=3"])
def test_a_launch_of_fixed_size_is_left_for_the_plan_to_refuse(fixed: str | None) -> None:
    given = launch(2, 3, comes_again=fixed)
    assert without_standby_ranks(given, EIGHT_PARTS) is given


def test_what_the_user_is_told() -> None:
    three = launch(0, 3)
    training = without_standby_ranks(three, EIGHT_PARTS)
    assert training is not None
    (waiting,) = elastic_notices(three, training)
    assert waiting.startswith("2 of 3 processes train")
    (store,) = elastic_notices(replace(launch(0, 2), store="node1:29500"), launch(0, 2))
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in store
    assert elastic_notices(launch(0, 2), launch(0, 2)) == ()


def test_a_host_that_may_come_back_must_find_the_others() -> None:
    def told(**arguments: Any) -> int:
        given = replace(launch(0, 2, **arguments), store="node1:29500")
        return len(elastic_notices(given, given))

    assert told(comes_again="--max-restarts=3") == 1
    assert told(comes_again="--max-restarts=3", per_node=2) == 0  # all on one host: it goes with its torchrun
    assert told(comes_again=None) == 0


def put_summary(run_dir: Path, status: Status, step: int) -> Summary:
    """Put a summary there as a run does: whole or not at all."""
    summary = Summary(
        status=status,
        step=step,
        epoch=1,
        samples=100,
        world_size=2,
        weights_sha256="",
        train_seconds=1.0,
        total_seconds=1.0,
        throughput_samples_per_second=None,
        data_wait_fraction=None,
        peak_memory_bytes=None,
        parameters=1,
        ledger=None,
    )
    write_json(run_dir / "summary.json", summary.to_json())
    return summary


def test_a_spare_waits_for_a_new_summary_of_a_complete_run(tmp_path: Path) -> None:
    put_summary(tmp_path, "completed", 10)
    ended: list[object] = []
    waiting = threading.Thread(target=lambda: ended.append(wait_for_training(tmp_path, poll_seconds=0.01)), daemon=True)
    waiting.start()
    statuses: tuple[Status, ...] = ("stopped", "failed")
    for status in statuses:
        put_summary(tmp_path, status, 15)
        time.sleep(0.1)
        assert waiting.is_alive()
    last = put_summary(tmp_path, "completed", 20)
    waiting.join(20)
    assert ended == [last]


def test_a_run_that_was_complete_before_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    put_summary(tmp_path, "completed", 10)
    begun = time.monotonic()
    assert wait_for_training(tmp_path, poll_seconds=0.01, patience_seconds=0.3).step == 10
    assert time.monotonic() - begun > 0.3
