"""Exact runs: the same bits from one, two, three or four processes, and from any number after any kill."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from calls import Call

VARIED = ("data.augment.policy=trivialaugment", "data.augment.erase=0.3", "data.mix={mixup: 0.4, cutmix: 1.0}")
EXACT = ("train", "recipe.yaml", "parallel.exact=true", *VARIED)
SIX_PARTS = ("batch.micro_size=auto", "batch.global_size=18", "parallel.logical_ranks=6", "train.duration=24 steps")


@pytest.fixture
def alone(studio: Path, run_here: Call) -> Call:
    """The directory of an exact run by one process; each is trained once."""

    def train(name: str, *overrides: str) -> Path:
        if not (studio / name / "summary.json").exists():
            run_here(*EXACT, *overrides, "--run-dir", name).ended(0)
        return studio / name

    return train


@pytest.mark.world_size(4)
@pytest.mark.parametrize("processes", [2, 4])
def test_any_number_of_processes_gives_the_same_bits(
    studio: Path, run: Call, alone: Call, same_end: Call, processes: int
) -> None:
    run_dir = studio / f"exact-{processes}"
    run(*EXACT, "--processes", processes, "--run-dir", run_dir, where=studio).ended(0)
    same_end(run_dir, alone("exact-1"))


@pytest.mark.slow
@pytest.mark.world_size(3)
def test_numbers_that_are_no_power_of_two(studio: Path, run: Call, alone: Call, same_end: Call) -> None:
    run_dir = studio / "exact-six-3"  # of six logical ranks each holds two: partial sums of several levels
    run(*EXACT, *SIX_PARTS, "--processes", 3, "--run-dir", run_dir, where=studio).ended(0)
    same_end(run_dir, alone("exact-six-1", *SIX_PARTS))


@pytest.mark.slow
@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    "worlds",
    [
        (2, 1),
        pytest.param((1, 4, 2), marks=pytest.mark.thorough),
    ],
)
def test_killed_and_resumed_by_fewer_processes_and_more(
    studio: Path,
    start: Call,
    run: Call,
    alone: Call,
    same_end: Call,
    steps_recorded: Call,
    worlds: tuple[int, ...],
    audited: Call,
) -> None:
    run_dir = studio / f"exact-chain-{'-'.join(map(str, worlds))}"
    draw = random.Random(worlds[0])
    for processes in worlds[:-1]:
        launched = start(*EXACT, "--processes", processes, "--run-dir", run_dir, where=studio)
        step = max(steps_recorded(run_dir), 0) + draw.randint(5, 18)
        launched.wait_for(lambda step=step: steps_recorded(run_dir) >= step)
        time.sleep(draw.uniform(0, 0.15))
        launched.kill()
    run(*EXACT, "--processes", worlds[-1], "--run-dir", run_dir, where=studio).ended(0)
    same_end(run_dir, alone("exact-1"))
    audited(run_dir)


MANY = ("batch.global_size=32", "batch.micro_size=2", "data.workers=0", "train.duration=40 steps")


@pytest.mark.thorough
@pytest.mark.world_size(16)
@pytest.mark.parametrize("processes", [8, 16])
def test_many_processes_on_few_cores(
    studio: Path,
    start: Call,
    run: Call,
    alone: Call,
    same_end: Call,
    steps_recorded: Call,
    audited: Call,
    processes: int,
) -> None:
    """More than the cores can run at once: one is killed, the others end soon, and all of them resume."""
    run_dir = studio / f"exact-many-{processes}"
    command = (*EXACT, *MANY, "--processes", processes, "--run-dir", run_dir)
    launched = start(*command, where=studio)
    launched.wait_for(lambda: steps_recorded(run_dir) >= 9)
    victim = processes - 3
    os.kill(launched.ranks()[victim], signal.SIGKILL)
    done = launched.wait().ended(1)
    assert f"rank {victim} was ended by SIGKILL" in done.err.splitlines()[0], done.err
    assert len(done.err.splitlines()) < 4 * processes, "no rank but one lists all others"
    launched.seconds_until_alone()
    assert launched.leftovers() == []
    assert "resumed from step-" in run(*command, where=studio).ended(0).out
    same_end(run_dir, alone("exact-many-1", *MANY))
    audited(run_dir)


# 90 samples in steps of 16, then 32, then 48: micro-batches of 4, of which there are 4, 8 and 12.
SCALED = ("optimizer.lr_scaling=linear", "optimizer.lr_reference_batch=16")
GROWING = ("batch.growth={1: 32, 2: 48}", "train.duration=3 epochs", "evaluate.every=1 epochs", *SCALED)
GROWING_LONGER = ("batch.growth={2: 32, 4: 48}", "train.duration=6 epochs", "checkpoint.every=0.5 epochs", *SCALED)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_a_batch_that_grows_gives_the_same_bits_in_any_world(
    studio: Path, run: Call, alone: Call, same_end: Call, summary: Call, records: Call
) -> None:
    run_dir = studio / "exact-growing"
    run(*EXACT, *GROWING, "--processes", 2, "--run-dir", run_dir, where=studio).ended(0)
    same_end(run_dir, alone("exact-growing-1", *GROWING))
    assert (summary(run_dir)["step"], summary(run_dir)["samples"]) == (6 + 3 + 2, 3 * 90)
    assert [each["step"] for each in records(run_dir, "evaluation")] == [6, 6, 9, 9, 11, 11]


@pytest.mark.slow
@pytest.mark.world_size(4)
def test_a_batch_that_grows_is_resumed_in_any_world(
    studio: Path, start: Call, run: Call, alone: Call, same_end: Call, steps_recorded: Call, audited: Call
) -> None:
    """Killed in the first size by two processes and in the second by four, and ended by two."""
    run_dir = studio / "exact-growing-longer"
    for processes, step in ((2, 9), (4, 15)):
        launched = start(*EXACT, *GROWING_LONGER, "--processes", processes, "--run-dir", run_dir, where=studio)
        launched.wait_for(lambda step=step: steps_recorded(run_dir) >= step)
        launched.kill()
    run(*EXACT, *GROWING_LONGER, "--processes", 2, "--run-dir", run_dir, where=studio).ended(0)
    same_end(run_dir, alone("exact-growing-longer-1", *GROWING_LONGER))
    audited(run_dir)


# Buffers of every awkward kind: infinite, replaced by each forward pass, numbers and flags that depend on the batch.
AWKWARD = """
import torch
from torch import nn

class Awkward(nn.Module):
    def __init__(self, num_classes, in_channels):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(in_channels * 144, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, num_classes)
        self.register_buffer("mask", torch.triu(torch.full((num_classes, num_classes), float("-inf")), 1))
        self.register_buffer("centre", torch.zeros(16))
        self.register_buffer("bright", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(4, dtype=torch.bool))

    def forward(self, x):
        features = self.body(x) - self.centre
        if self.training:
            self.centre = 0.9 * self.centre + 0.1 * features.detach().mean(0)
            self.bright += (x > 0).sum()
            self.seen[int(self.bright) % 4] = True
        bias = self.mask.exp().sum(1) * (1 + 1e-3 * (self.bright % 7)) + 1e-3 * self.seen.sum()
        return self.head(features) + bias
"""
AWKWARD_MODEL = (
    "model.name=awkward:Awkward",
    "model.options=null",
    "train.duration=20 steps",
    "checkpoint.every=7 steps",
)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_buffers_of_every_kind_are_the_same_on_all_processes_and_after_a_resume(
    studio: Path, run: Call, alone: Call, summary: Call
) -> None:
    (studio / "awkward.py").write_text(AWKWARD)
    run_dir = studio / "exact-awkward"
    for processes, duration in ((2, 9), (1, 14), (2, 20)):
        shortened = (*AWKWARD_MODEL, f"train.duration={duration} steps", "schedule.name=constant")
        run(*EXACT, *shortened, "--processes", processes, "--run-dir", run_dir, where=studio).ended(0)
    whole = alone("exact-awkward-1", *AWKWARD_MODEL, "schedule.name=constant")
    for key in ("weights_sha256", "ema_sha256"):
        assert summary(run_dir)[key] == summary(whole)[key]


def test_what_the_bits_depend_on_may_not_change(run_here: Call) -> None:
    short = (*EXACT, "--run-dir", "exact-short")
    assert run_here(*short, "train.duration=8 steps").code == 0
    longer = "train.duration=12 steps"
    run_here(*short, longer, "parallel.threads=2").refused("threads_per_process=1", "parallel.threads")
    run_here(*short, longer, "batch.micro_size=8").refused("logical_ranks=4")
    run_here(*short, longer, "parallel.exact=false").refused("parallel.exact")


def test_impossible_requests_are_refused(run_here: Call, studio: Path) -> None:
    for wrong, words in {
        "parallel.logical_ranks=8": "batch.micro_size=4 times parallel.logical_ranks=8 is 32",
        "parallel.strategy=ddp": "leave the strategy at auto",
        "parallel.bucket_cap_mb=5": "an exact run has no buckets",
    }.items():
        run_here(*EXACT, wrong, "--run-dir", "never").refused(words)
    run_here(*EXACT, "--plan-only", "--processes", "3").refused("run it on 1, 2, 4 processes")
    assert not (studio / "never").exists()
