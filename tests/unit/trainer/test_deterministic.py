"""What determinism costs is measured before the first step, and leaves no trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.errors import ModelError

Make = Callable[..., Any]

ASKED = {"train.deterministic": True}
SENSITIVE = {"model.options.dropout": 0.3, "data.augment.flip": 0.5, "train.ema": 0.9, "batch.micro_size": 8}


def test_its_cost_is_told_once(train_tiny: Make, events: Make) -> None:
    result = train_tiny("run", {**SENSITIVE, **ASKED, "train.until": "4 steps"})
    measured, *_ = events(result.run_dir, "measurement")
    assert (measured["what"], measured["step"]) == ("deterministic", 0)
    assert measured["slowdown"] > 0
    assert "times as long as without it" in measured["message"]
    train_tiny("run", {**SENSITIVE, **ASKED})
    assert [each for each in events(result.run_dir, "measurement") if each["what"] == "deterministic"] == [measured]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_measuring_leaves_no_trace(train_tiny: Make, precision: str) -> None:
    """On a CPU the kernels are the same ones."""
    plain = train_tiny("plain", {**SENSITIVE, "train.precision": precision})
    measured = train_tiny("measured", {**SENSITIVE, "train.precision": precision, **ASKED})
    assert measured.summary.weights_sha256 == plain.summary.weights_sha256
    assert measured.summary.ema_sha256 == plain.summary.ema_sha256


def test_buffers_come_back_to_where_they_were(train_tiny: Make, tiny_task: Make) -> None:
    """Those too that a forward pass has put another tensor in the place of."""
    seen: list[float] = []

    class Peeking(nn.Module):
        """Puts another tensor in a buffer's place."""

        mean: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.rand(()))
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                seen.append(float(self.mean))
                self.mean = 0.5 * self.mean + x.detach().mean()
            return self.body(x)

    task = tiny_task(make_network=Peeking)
    train_tiny("plain", {"train.duration": "2 steps", "evaluate.every": "off"}, task=task)
    expected, seen = seen[-2:], []
    train_tiny("measured", {"train.duration": "2 steps", "evaluate.every": "off", **ASKED}, task=task)
    assert seen[-2:] == expected


class Unpooling(nn.Module):
    """Its max_unpool2d has no deterministic kernel on any device."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled, places = F.max_pool2d(x, 2, return_indices=True)
        return self.body(F.max_unpool2d(pooled, places, 2).flatten(1))


def test_an_operation_without_a_deterministic_kernel_is_named(train_tiny: Make) -> None:
    with pytest.raises(ModelError, match=r"train.deterministic=true: max_unpool\S+ does not have a deterministic"):
        train_tiny("run", ASKED, make_network=Unpooling)


def test_products_are_in_the_plan_and_in_the_environment(train_tiny: Make) -> None:
    run_dir: Path = train_tiny("run", {"train.float32_matmul": "highest"}).run_dir
    assert json.loads((run_dir / "plan.json").read_text())["float32_matmul"] == "highest"
    environment = json.loads((run_dir / "environment.json").read_text())
    assert (environment["float32_matmul"], environment["cudnn_tf32"]) == ("highest", False)
