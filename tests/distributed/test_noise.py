"""The gradient noise scale over processes: each gives the norm of its own gradient before it is reduced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import Call

import paceline
from paceline.metrics.gradient_noise import NoiseAverages, estimate
from paceline.trainer.noise import HALF_LIFE

# Each sample's gradient is a row of a table: the loss is linear in the weights.
PROGRAM = """
import json, sys
import numpy as np, torch
from torch import nn
import paceline
from paceline.tasks.image_classification import ImageClassification

TABLE = torch.tensor(np.random.default_rng(5).normal(0.5, 1.0, (2000, 5)), dtype=torch.float32)
made, seen = [], {}

class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))
        made.append(self)
    def forward(self, x):
        return (self.first.sum() + self.second.sum()).expand(len(x), 10)

class Known(ImageClassification):
    def build_model(self):
        return Linear()
    def loss(self, model, batch):
        model(batch.inputs)
        seen.setdefault(batch.slice.step, {})[batch.slice.logical_rank] = batch.ids.tolist()
        return (TABLE[batch.ids] @ torch.cat([made[-1].first, made[-1].second])).mean()

overrides = json.loads(sys.argv[1])
folder = overrides.pop("folder")
task = Known if overrides.pop("known") else None
result = paceline.train("digits", overrides=overrides, run_dir=folder, task=task, quiet=True)
print(json.dumps({"seen": seen, "weights": result.summary.weights_sha256}))
"""

COMMON = {
    "model.options": {"width": 4, "stages": 1},
    "batch.global_size": 12,
    "optimizer.clip_norm": 0.5,
    "train.ema": "off",
    "train.duration": "5 steps",
    "evaluate.every": "off",
    "checkpoint.every": "off",
    "parallel.device": "cpu",
    "telemetry.log_every": "1 steps",
    "telemetry.trackers": [],
}
NOISE = {"telemetry.noise_scale": "1 steps"}


NUMBERS = ("gradient_variance", "gradient_square", "noise_scale", "noise_scale_low", "noise_scale_high")


@pytest.fixture
def together(on_two_ranks: Call, tmp_path: Path) -> Call:
    """``together("a", {...})``: what two processes print that train so in ``tmp_path/a/run``."""

    def train(name: str, overrides: dict[str, Any], *, known: bool = False) -> tuple[Path, list[dict[str, Any]]]:
        where = tmp_path / name
        where.mkdir()
        asked = {**COMMON, **overrides, "folder": str(where / "run"), "known": known}
        return where / "run", on_two_ranks(["-c", PROGRAM, json.dumps(asked)], where, seconds=180)

    return train


@pytest.mark.parametrize(
    ("cut", "measured"),
    [
        pytest.param({"batch.micro_size": 3}, (0, 2), id="two each"),
        pytest.param({"parallel.exact": True, "batch.micro_size": 3}, (0, 1, 2, 3), id="exact"),
    ],
)
def test_each_process_gives_its_own_norm(
    together: Call, events: Call, cut: dict[str, Any], measured: tuple[int, ...]
) -> None:
    table = np.random.default_rng(5).normal(0.5, 1.0, (2000, 5)).astype(np.float32)
    run, (one, other) = together("a", {**NOISE, **cut}, known=True)
    averages = NoiseAverages(half_life=HALF_LIFE)
    for step in range(5):
        parts = {int(rank): ids for each in (one, other) for rank, ids in each["seen"][str(step)].items()}
        squares = {rank: float((table[ids].mean(0) ** 2).sum()) for rank, ids in parts.items()}
        whole = float((table[np.concatenate(list(parts.values()))].mean(0) ** 2).sum())
        found = estimate(len(parts[0]), sum(squares[rank] for rank in measured) / len(measured), 12, whole)
        assert found is not None
        averages.add(found)
    last = events(run, "step")[-1]
    assert last["gradient_variance"] == pytest.approx(averages.mean_variance, rel=1e-4)
    assert last["gradient_square"] == pytest.approx(averages.mean_square, rel=1e-4)


def test_measuring_changes_no_weight(together: Call) -> None:
    (_, watched), (_, alone) = together("watched", NOISE), together("alone", {})
    assert watched[0]["weights"] == alone[0]["weights"]


def test_exact_runs_record_the_same_with_any_number_of_processes(together: Call, tmp_path: Path, course: Call) -> None:
    exact = {**COMMON, **NOISE, "parallel.exact": True, "parallel.logical_ranks": 4}
    run, _ = together("two", exact)
    paceline.train("digits", overrides=exact, run_dir=tmp_path / "one", quiet=True)
    paths = (run, tmp_path / "one")
    two, one = ([[each[key] for key in NUMBERS] for each in course(path) if each["event"] == "step"] for path in paths)
    assert two == one
    assert len(two) == 5
