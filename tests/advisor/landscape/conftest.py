"""Networks whose landscape is known by a formula, and small runs to look at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import paceline
from paceline.data.batch import Batch
from paceline.data.slices import SampleSlice
from paceline.metrics.accumulator import Metric
from paceline.tasks.task import Task
from paceline_advisor.landscape.loss_surface import LossSurface

TINY = {
    "model.options": {"width": 4, "stages": 1, "depth": 1},
    "train.duration": "40 steps",
    "train.ema": "off",
    "checkpoint.every": "10 steps",
    "checkpoint.keep": 10,
    "evaluate.every": "40 steps",
    "parallel.device": "cpu",
    "telemetry.trackers": [],
}


class Bowl(nn.Module):
    """Half x·Ax, of weights x in one matrix of three filters, for every sample; of A's diagonal or A itself."""

    def __init__(self, matrix: torch.Tensor, at: torch.Tensor) -> None:
        super().__init__()
        self.matrix = matrix
        self.x = nn.Parameter(at.reshape(3, -1).clone())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.x.reshape(-1)
        return (0.5 * x @ self.matrix @ x).expand(len(inputs))


class BowlTask(Task):
    """Its loss is what the network answers."""

    metrics = (Metric(name="loss"),)

    def __init__(self) -> None:
        super().__init__(SimpleNamespace())  # type: ignore[arg-type]  # nothing here asks for a recipe

    def score(self, model: Any, batch: Batch) -> dict[str, torch.Tensor]:
        return {"loss": model(batch.inputs)}

    data_facts = open_pipeline = build_model = loss = None  # type: ignore[assignment]  # and nobody for these


def batch_of(inputs: torch.Tensor, targets: torch.Tensor | None = None) -> Batch:
    ids = np.arange(len(inputs))
    place = SampleSlice(step=0, epoch=0, logical_rank=0, ids=ids, step_weight=len(ids))
    return Batch(inputs, torch.zeros(len(ids), dtype=torch.int64) if targets is None else targets, ids, place)


@pytest.fixture
def bowl() -> Callable[..., LossSurface]:
    """``bowl(matrix, at)``: the subject with that quadratic loss, on five samples in two batches."""

    def make(matrix: torch.Tensor, at: torch.Tensor) -> LossSurface:
        batches = [batch_of(torch.zeros(3, 1)), batch_of(torch.zeros(2, 1))]
        return LossSurface(BowlTask(), Bowl(matrix, at), {"train": batches, "validation": batches})

    return make


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``trained("a", seed=1)``: the directory of a tiny run on the digits, made once; only to be read."""
    root = tmp_path_factory.mktemp("landscapes")

    def train(name: str, **overrides: Any) -> Path:
        if not (root / name).exists():
            requested = {**TINY, **{key.replace("__", "."): value for key, value in overrides.items()}}
            paceline.train("digits", overrides=requested, run_dir=root / name, quiet=True)
        return root / name

    return train
