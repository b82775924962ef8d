"""A range test of two processes: all see the same losses, end at the same step, and leave the next training alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from calls import Call

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc"),
    pytest.mark.world_size(2),
]

FIND = ("find-lr", "recipe.yaml", "--lowest", "1e-4", "--highest", "10", "--steps", "40", "--json")
TRAIN = ("train", "recipe.yaml", "train.duration=12 steps", "evaluate.every=off")
# The loss explodes on one process only, and all of them hear of it.
SPOILED = """
import os
import torch
from torch import nn

class Spoiled(nn.Module):
    def __init__(self, num_classes, in_channels):
        super().__init__()
        self.head = nn.Linear(in_channels * 144, num_classes)
        self.calls = 0

    def forward(self, x):
        self.calls += self.training and torch.is_grad_enabled()
        grown = self.calls > 60 and os.environ["RANK"] == "1"
        return self.head(x.flatten(1)) * (WORSE if grown else 1.0)
"""


def test_two_processes_find_what_one_finds(studio: Path, run: Call, run_here: Call) -> None:
    """Exact, so that the numbers are those of one process to the bit."""
    exact = ("parallel.exact=true", "parallel.logical_ranks=4", "batch.micro_size=auto")
    alone = json.loads(run_here(*FIND, *exact).out)
    before = {path.name for path in studio.iterdir()}
    done = run(*FIND, *exact, "--processes", "2", where=studio)
    together = json.loads(done.out)
    assert {path.name for path in studio.iterdir()} - before <= {path.name for path in studio.glob("*.???")}
    assert (alone["world_size"], together["world_size"]) == (1, 2)
    for key in ("lrs", "losses", "smoothed", "stop"):
        assert together[key] == alone[key]
    suggested = [{name: each["lr"] for name, each in found["suggestions"].items()} for found in (alone, together)]
    assert suggested[0] == suggested[1]


@pytest.mark.parametrize(("worse", "reason"), [("1e4", "diverged"), ("float('nan')", "not_finite")])
@pytest.mark.thorough
def test_all_end_where_the_loss_of_one_is_spoiled(studio: Path, run: Call, worse: str, reason: str) -> None:
    (studio / "spoiled.py").write_text(SPOILED.replace("WORSE", worse))
    model = ("model.name=spoiled:Spoiled", "model.options=null", "data.workers=0", "optimizer.clip_norm=off")
    done = run(*FIND, *model, "--processes", "2", "--smoothing", "0.5", where=studio)
    found = json.loads(done.out)
    assert found["stop"]["reason"] == reason
    # Two micro-batches of each process a step, but for an epoch's last one: the 61st call is in the 31st step.
    assert 25 < found["stop"]["steps"] <= 33


@pytest.mark.world_size(1)
def test_the_following_training_has_the_same_bits(studio: Path, run_here: Call, summary: Call) -> None:
    """Even of the same process."""
    digests = []
    for name in ("before", "after"):
        done = run_here(*TRAIN, "--run-dir", studio / f"find-lr-{name}")
        assert done.code == 0, done.err
        digests.append(summary(studio / f"find-lr-{name}")["weights_sha256"])
        if name == "before":
            assert run_here(*FIND).code in (0, 1)
    assert digests[0] == digests[1]
