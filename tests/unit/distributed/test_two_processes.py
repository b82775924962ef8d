"""What two processes do to one another's tensors, groups and buffers: real processes that meet through a file."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Both = Callable[..., list[dict[str, Any]]]
BEGINNING = """
import json, os, sys
import torch
from torch import nn
from paceline.distributed.collectives import Collectives, join, leave
from paceline.distributed.environment import read_launch

CPU = torch.device("cpu")
launch = read_launch(os.environ)
rank = launch.world.rank
answer = {}
"""
# Threads of a group that something still holds would abort the interpreter's own end.
END = """
import gc, os
gc.collect()
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
print(json.dumps(answer), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="session")
def both(on_two_ranks: Both) -> Both:
    """Run a program on two ranks; returns what each put into ``answer``."""
    return lambda program, directory: on_two_ranks(["-c", BEGINNING + textwrap.dedent(program) + END], directory)


@pytest.fixture(scope="module")
def results(both: Both, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two processes have to say of one meeting: the same on both."""
    first, second = both(
        """
        from dataclasses import replace
        from paceline.distributed.data_parallel import DataParallel
        from paceline.recipe.running import Parallel
        from paceline.distributed.strategy import ControlFlags
        from paceline.errors import LaunchError, OtherProcessError
        from paceline.host.world import World

        collectives = join(launch, CPU)
        calls, broadcast = [], torch.distributed.broadcast
        torch.distributed.broadcast = lambda *a, **k: calls.append(1) or broadcast(*a, **k)
        tensors = [
            torch.full((3,), rank + 0.5, dtype=torch.bfloat16),
            torch.tensor(rank + 7),
            torch.tensor([rank == 0, True, False]),
            torch.full((2, 3), rank + 0.25).t(),
            torch.full((), rank + 1e-12, dtype=torch.float64),
            torch.empty(0),
        ]
        collectives.broadcast_tensors(tensors)
        answer["tensors"] = [len(calls), [t.tolist() for t in tensors]]

        network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        strategy = DataParallel(network, network, collectives, CPU, parallel=Parallel(bucket_cap_mb=1))
        calls.clear()
        answer["means"], answer["calls"] = [], []
        for step in range(2):
            loss = strategy.model(torch.full((4, 2), float(rank + step)).cumsum(0)).square().mean()
            strategy.with_vote(loss, ControlFlags, is_last=True).backward()
            for _ in range(2):
                strategy.sync_buffers([network])
            answer["calls"].append(len(calls))
            answer["means"].append(network[1].running_mean.tolist())

        try:
            collectives.on_rank_zero(lambda: 1 // 0)
        except (ZeroDivisionError, OtherProcessError) as error:
            answer["failed"] = collectives.gather(f"{type(error).__name__}: {error}")
        try:
            collectives.on_all_ranks(lambda: 1 // (1 - rank))
        except (ZeroDivisionError, OtherProcessError) as error:
            answer["failed on all"] = collectives.gather(f"{type(error).__name__}: {error}")

        try:
            join(replace(launch, world=World()), CPU)
        except LaunchError as error:
            answer["error"] = str(error)
        del strategy
        leave()
        answer["left"] = not torch.distributed.is_initialized()
        """,
        tmp_path_factory.mktemp("told"),
    )
    assert first == second
    return first


def test_one_broadcast_carries_tensors_of_every_kind(results: dict[str, Any]) -> None:
    assert results["tensors"] == [1, [[0.5] * 3, 7, [True, True, False], [[0.25] * 2] * 3, 1e-12, []]]


def test_buffers_that_were_just_made_equal_are_not_sent_again(results: dict[str, Any]) -> None:
    assert results["calls"] == [1, 2]
    assert results["means"][0] != results["means"][1]


def test_an_error_of_the_first_process_is_an_error_of_the_others_and_no_mistake(results: dict[str, Any]) -> None:
    here, there = results["failed"]
    assert here.startswith("ZeroDivisionError: ")
    assert there.startswith("OtherProcessError: the first process failed: ZeroDivisionError(")


def test_an_error_of_any_process_reaches_the_others_at_once(results: dict[str, Any]) -> None:
    there, here = results["failed on all"]
    assert here.startswith("ZeroDivisionError: ")
    assert there.startswith("OtherProcessError: rank 1 failed: ZeroDivisionError(")


def test_a_group_of_another_size_is_refused(results: dict[str, Any]) -> None:
    message = "this process is in a process group of 2, but the environment describes a world of 1"
    assert results["error"].startswith(message)


def test_a_group_that_was_formed_here_is_dissolved(results: dict[str, Any]) -> None:
    assert results["left"]


# The scale decides the gradient and follows each rank's own samples: ranks that are not made equal drift apart.
SCALED = """
import torch
from torch import nn
from paceline.tasks.image_classification import ImageClassification

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 10)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, images):
        if self.training:
            self.scale += images.mean().abs()
        return self.linear(images.flatten(1)) / self.scale

class Task(ImageClassification):
    def build_model(self):
        return Scaled()
"""


def test_a_buffer_of_training_is_the_same_whatever_the_evaluations_and_saves_and_the_callers_group_stays(
    both: Both, tmp_path: Path
) -> None:
    (tmp_path / "scaled.py").write_text(SCALED)
    program = """
        import paceline
        from scaled import Task
        torch.distributed.init_process_group("gloo", init_method=launch.rendezvous, rank=rank, world_size=2)
        short = {"train.duration": "6 steps", "batch.global_size": 32, "batch.micro_size": 8, "parallel.threads": 1,
                 "telemetry.log_every": "6 steps", "parallel.device": "cpu", "schedule.warmup": "0 steps"}
        for every in ("1 steps", "4 steps", "off"):
            often = {**short, "evaluate.every": every, "checkpoint.every": every}
            result = paceline.train("digits", overrides=often, run_dir=f"runs/{every[0]}", task=Task, quiet=True)
            answer[every] = result.summary.weights_sha256
        answer["group stays"] = torch.distributed.is_initialized()
    """
    first, second = both(program, tmp_path)
    assert first == second
    assert first.pop("group stays")
    assert len(set(first.values())) == 1
