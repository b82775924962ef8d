"""fp16 with loss scaling: a step whose gradients overflow is not taken, though its samples are used up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paceline.models.precision import Precision
from paceline.reports.audit import audit_run
from torch import nn

from paceline.data.batch import Batch
from paceline.errors import TrainingError
from paceline.recipe.training import GradScaler

Make = Callable[..., Any]

FP16 = {
    "train.precision": "fp16",
    "train.grad_scaler.init_scale": 1024.0,
    "telemetry.log_every": "1 steps",
    "evaluate.every": "off",
    "schedule.name": "linear",
    "train.duration": "10 steps",
    "train.ema": 0.8,
}


def poisoned(positions: set[int]) -> Callable[[Batch, torch.Tensor], torch.Tensor | None]:
    """Make the scaled loss overflow at these positions, counted from 1; the loss itself stays a number."""

    def on_loss(batch: Batch, loss: torch.Tensor) -> torch.Tensor | None:
        return loss * 3e38 / loss.detach() if batch.slice.step + 1 in positions else None

    return on_loss


def by_position(run: Any, events: Make) -> dict[int, dict[str, Any]]:
    return {event["position"]: event for event in events(run.run_dir, "step")}


def test_a_skipped_step_advances_nothing_but_the_data(train_tiny: Make, events: Make) -> None:
    result = train_tiny("run", FP16, on_loss=poisoned({3, 4, 9}))
    assert (result.status, result.summary.step, result.summary.samples) == ("completed", 7, 2 * 52 + 2 * 16)
    found = by_position(result, events)
    assert [found[position]["step"] for position in range(1, 11)] == [1, 2, 2, 2, 3, 4, 5, 6, 6, 7]
    rates = [0.05 * (1 - step / 10) for step in range(7)]
    assert [found[position]["lr"] for position in (1, 2, 5, 6, 7, 8, 10)] == pytest.approx(rates)
    scales = [1024, 1024, 512, 256, 256, 256, 256, 256, 128, 128]
    assert [found[position]["grad_scale"] for position in range(1, 11)] == scales
    assert found[10]["samples"] == result.summary.samples
    assert audit_run(result.run_dir).passed


def test_neither_weights_nor_average_nor_optimizer_move(train_tiny: Make, tiny_task: Make, weights: Make) -> None:
    """A run that skips its last steps ends where it would have ended without them."""

    def network() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 3))

    task = tiny_task(make_network=network, on_loss=poisoned({6, 7, 8}))
    overrides = {**FP16, "schedule.name": "constant", "train.duration": "8 steps"}
    skipping = train_tiny("skipping", overrides, task=task)
    short = train_tiny("short", {**overrides, "train.duration": "5 steps"}, task=task)
    assert skipping.summary.step == short.summary.step == 5
    assert skipping.summary.weights_sha256 == short.summary.weights_sha256
    assert skipping.summary.ema_sha256 == short.summary.ema_sha256


@pytest.fixture
def summing(tiny_task: Make) -> Any:
    """A network whose one weight is the sum of the rates of the steps taken; the third and the sixth overflow."""
    made: list[nn.Parameter] = []

    class Summing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.total = nn.Parameter(torch.zeros(()))
            made.append(self.total)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.total.expand(len(x), 3)

    def on_loss(batch: Batch, _: torch.Tensor) -> torch.Tensor:
        return -made[-1] * (3e38 if batch.slice.step in (2, 5) else 1.0)

    return tiny_task(make_network=Summing, on_loss=on_loss)


def test_the_rate_is_that_of_the_steps_taken(train_tiny: Make, summing: Any, weights: Any) -> None:
    result = train_tiny("run", {**FP16, "optimizer.momentum": 0}, task=summing)
    rates = [0.05 * (1 - step / 10) for step in range(8)]
    assert weights(result)["total"].item() == pytest.approx(sum(rates), rel=1e-6)


def test_the_average_counts_only_steps_taken(train_tiny: Make, summing: Any, weights: Any) -> None:
    overrides = {**FP16, "schedule.name": "constant", "optimizer.lr": 1.0, "optimizer.momentum": 0}
    result = train_tiny("run", overrides, task=summing)
    assert weights(result)["total"].item() == result.summary.step == 8
    average = 0.0
    for step in range(8):
        kept = min(0.8, (1 + step) / (10 + step))
        average = kept * average + (1 - kept) * (step + 1)
    assert weights(result, "ema")["total"].item() == pytest.approx(average, rel=1e-6)


def test_a_run_that_can_take_no_step_fails(train_tiny: Make, runs: Path) -> None:
    """The scale falls to nothing. Not one of these steps is counted, and the run does not pretend to be complete."""
    overrides = {**FP16, "train.duration": "200 steps", "telemetry.log_every": "50 steps"}
    with pytest.raises(TrainingError):
        train_tiny("run", overrides, on_loss=lambda _, loss: loss * float("nan"))
    summary = json.loads((runs / "run" / "summary.json").read_text())
    assert (summary["status"], summary["step"]) == ("failed", 0)


def test_clipping_measures_the_true_gradient(train_tiny: Make, events: Make) -> None:
    norms = []
    for name, scale in (("small", 1.0), ("large", 4096.0)):
        overrides = {
            **FP16,
            "train.grad_scaler.init_scale": scale,
            "optimizer.clip_norm": 0.1,
            "train.duration": "1 steps",
        }
        norms.append(events(train_tiny(name, overrides).run_dir, "step")[0]["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=0.02)


# ------------------------------------------------------------------------------------------ the verbs

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_autocast(name: str, dtype: torch.dtype) -> None:
    precision = Precision(name, CPU, GradScaler())
    inside: list[torch.dtype] = []
    network = precision.applied_to(lambda x: inside.append((x @ x).dtype) or x @ x)  # type: ignore[func-returns-value]
    assert network(torch.ones(2, 2)).dtype == torch.float32
    assert inside == [dtype]
    assert (precision.scaler is not None) == (name == "fp16")
    assert precision.scale == (65536.0 if name == "fp16" else 1.0)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_weights_and_moments_stay_fp32(name: str, train_tiny: Make, weights: Make) -> None:
    result = train_tiny("run", {"train.precision": name, "train.duration": "2 steps", "train.ema": 0.5})
    for which in ("model", "ema"):
        dtypes = {value.dtype for key, value in weights(result, which).items() if "num_batches" not in key}
        assert dtypes == {torch.float32}


def test_a_fused_sgd_that_skips_its_first_step_has_no_momentum_yet() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9, fused=True)
    precision = Precision("fp16", torch.device("cpu"), GradScaler(init_scale=2.0))
    for loss, is_taken in ((weight.sum() * torch.inf, False), (weight.sum(), True)):
        precision.backward(loss)
        precision.unscale(optimizer)
        assert precision.step(optimizer) is is_taken
        assert bool(optimizer.state) is is_taken
        optimizer.zero_grad()
    assert torch.equal(weight.detach(), torch.zeros(3))
