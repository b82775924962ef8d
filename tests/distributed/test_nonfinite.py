"""A loss that is no number on one rank: all leave the step out alike, and stay replicas of one another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import Call
from PIL import Image

pytestmark = pytest.mark.world_size(2)

# The loss of a white image is no number. Each forward pass notes what the weights are, so that replicas can be told
# from one another.
POISONED = """
import hashlib, os
import torch
from torch import nn

class Poisoned(nn.Module):
    def __init__(self, num_classes, in_channels):
        super().__init__()
        self.norm = nn.BatchNorm2d(in_channels)
        self.head = nn.Linear(in_channels * 144, num_classes)

    def forward(self, x):
        if self.training and "NOTES" in os.environ:
            digest = hashlib.sha256(self.head.weight.detach().numpy().tobytes()).hexdigest()
            with open(f"{os.environ['NOTES']}-{os.environ['RANK']}", "a") as notes:
                print(digest, file=notes)
        white = (x.flatten(1).amin(1) > 1.5).reshape(-1, 1, 1, 1)
        return self.head(self.norm(torch.where(white, x * float("nan"), x)).flatten(1))
"""
TRAIN = (
    *("train", "recipe.yaml", "model.name=poisoned:Poisoned", "model.options=null", "data.workers=0"),
    *(
        "data.augment=null",
        "optimizer.clip_norm=off",
        "train.precision=fp32",
        "train.nonfinite=skip",
        "train.duration=12 steps",
    ),
    "evaluate.every=off",
)


@pytest.fixture
def gallery(studio: Path) -> Iterator[Path]:
    """The studio with a white image among its photos, which is used once in each of the two epochs."""
    photo = studio / "photos" / "train" / "green" / "000.png"
    (studio / "poisoned.py").write_text(POISONED)
    before = photo.read_bytes()
    Image.fromarray(np.full((12, 12, 3), 255, np.uint8)).save(photo)
    yield studio
    photo.write_bytes(before)


def incidents(records: Call, run_dir: Path) -> list[dict[str, Any]]:
    return [each for each in records(run_dir, "incident") if each["incident"] == "nonfinite_loss"]


@pytest.mark.everyday
def test_replicas_stay_replicas_and_save_together(gallery: Path, run: Call, records: Call, summary: Call) -> None:
    run_dir = gallery / "poisoned"
    notes = {"NOTES": str(gallery / "weights")}
    # By the clock, of which each process has its own: they must agree on the steps after which they save.
    asked = (*TRAIN, "checkpoint.every=0.001 seconds", "checkpoint.keep=99")
    run(*asked, "--processes", "2", "--run-dir", run_dir, where=gallery, variables=notes).ended(0)
    assert summary(run_dir)["step"] == 10
    # One by the clock at least, and the last: none begins while one is written, which takes as long as the disk takes.
    assert len(list((run_dir / "checkpoints").glob("step-*"))) >= 2
    found = incidents(records, run_dir)
    assert [each["position"] - each["step"] for each in found] == [1, 2]
    assert all(len(each["ranks"]) == 1 and len(each["samples"]) == 4 for each in found)
    seen = [(gallery / f"weights-{rank}").read_text().split() for rank in range(2)]
    assert seen[0] == seen[1]
    # One set of weights for each step that was taken: a step that is left out shows those of the step after it.
    assert len(set(seen[0])) == 10 + (found[-1]["position"] == 12)


@pytest.mark.thorough
def test_an_exact_run_leaves_out_the_same_with_any_number_of_processes(
    gallery: Path, run: Call, run_here: Call, records: Call, summary: Call
) -> None:
    exact = (*TRAIN, "batch.micro_size=auto", "parallel.exact=true", "checkpoint.every=4 steps", "--run-dir")
    one, two = gallery / "exact-one", gallery / "exact-two"
    assert run_here(*exact, one).code == 0
    run(*exact, two, "--processes", "2", where=gallery).ended(0)
    for key in ("step", "samples", "weights_sha256", "ema_sha256", "ledger"):
        assert summary(one)[key] == summary(two)[key], key
    assert records(one, "step") == records(two, "step")
    assert [{**each, "ranks": 0, "message": 0} for each in incidents(records, one)] == [
        {**each, "ranks": 0, "message": 0} for each in incidents(records, two)
    ]
    assert len(incidents(records, two)) == 2
