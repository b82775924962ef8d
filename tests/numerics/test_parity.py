"""The trainer against a plain PyTorch loop on the same batches: the same bits.

The loop below shares nothing with the trainer but the order of the samples and the raw pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from calls import Call
from torch import nn

from paceline.data.order import epoch_order
from paceline.models.small_resnet import small_resnet

SEED, STEPS, BATCH = 3, 30, 16


@dataclass(frozen=True)
class Pixels:
    """The tiny data set as the trainer's task opens it, normalised as its recipe says."""

    images: np.ndarray
    labels: np.ndarray

    def batch(self, ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        pixels = torch.from_numpy(self.images[ids].transpose(0, 3, 1, 2).copy()).float()
        # (x / 255 - 0.4) / 0.25 with one rounding of each constant
        inputs = pixels * torch.tensor(1 / (255 * 0.25)).float() + torch.tensor(-0.4 / 0.25).float()
        return inputs, torch.from_numpy(self.labels[ids])


@pytest.fixture
def pixels(tiny_task: Call) -> Pixels:
    source = tiny_task()(None).dataset.train
    return Pixels(source.images, source.labels)


def resnet() -> nn.Module:
    return small_resnet(3, 1, width=4, stages=1, depth=1)


def ids_of(step: int, samples: int) -> np.ndarray:
    per_epoch = math.ceil(samples / BATCH)
    return epoch_order(SEED, step // per_epoch, samples)[step % per_epoch * BATCH :][:BATCH]


def plain_loop(
    pixels: Pixels,
    optimize: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    rate: Callable[[int], float] = lambda step: 0.05,
    clip: float | None = None,
    smoothing: float = 0.0,
    channels_last: bool = False,
) -> nn.Module:
    """The twenty lines that everybody writes."""
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    torch.manual_seed(SEED)
    model = resnet().to(memory_format=memory_format)  # type: ignore[call-overload]
    optimizer = optimize(model)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        inputs, targets = pixels.batch(ids_of(step, len(pixels.labels)))
        optimizer.zero_grad()
        logits = model(inputs.contiguous(memory_format=memory_format))
        F.cross_entropy(logits, targets, label_smoothing=smoothing).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def split(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]


def cosine(step: int) -> float:
    if step < 5:
        return 0.05 * (step + 1) / 5
    return 0.001 + (0.05 - 0.001) * (1 + math.cos(math.pi * (step - 5) / (STEPS - 5))) / 2


CASES: dict[str, tuple[dict[str, Any], Callable[[nn.Module], torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": ({"optimizer.momentum": 0}, lambda m: torch.optim.SGD(m.parameters(), lr=0.05), {}),
    "momentum": ({}, lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9), {}),
    "nesterov with decay": (
        {"optimizer.nesterov": True, "optimizer.weight_decay": 0.01},
        lambda m: torch.optim.SGD(split(m, 0.01), lr=0.05, momentum=0.9, nesterov=True),
        {},
    ),
    "adamw": (
        {"optimizer.name": "adamw", "optimizer.weight_decay": 0.1, "optimizer.betas": [0.8, 0.95]},
        lambda m: torch.optim.AdamW(split(m, 0.1), lr=0.05, betas=(0.8, 0.95), fused=True),
        {},
    ),
    "cosine, warm-up, clipping and smoothing": (
        {
            "schedule.name": "cosine",
            "schedule.warmup": "5 steps",
            "schedule.end_lr": 0.001,
            "optimizer.clip_norm": 0.5,
            "train.label_smoothing": 0.1,
        },
        lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
        {"rate": cosine, "clip": 0.5, "smoothing": 0.1},
    ),
    "channels last": (
        {"model.channels_last": True},
        lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
        {"channels_last": True},
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.everyday
def test_the_same_bits_as_a_plain_loop(case: str, train_tiny: Call, weights: Call, pixels: Pixels) -> None:
    overrides, optimize, options = CASES[case]
    result = train_tiny(
        "run", {"seed": SEED, "train.duration": f"{STEPS} steps", "evaluate.every": "7 steps", **overrides}
    )
    expected = plain_loop(pixels, optimize, **options).state_dict()
    ours = weights(result)
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(ours[key], value), key


def test_the_recorded_loss_is_the_mean_over_the_samples_since_the_last_record(
    train_tiny: Call, events: Call, pixels: Pixels
) -> None:
    result = train_tiny("run", {"seed": SEED, "optimizer.lr": 1e-30, "telemetry.log_every": "3 steps"})
    torch.manual_seed(SEED)
    model = resnet()
    totals = []
    for step in range(8):
        inputs, targets = pixels.batch(ids_of(step, 52))
        totals.append((F.cross_entropy(model(inputs), targets, reduction="sum").item(), len(targets)))
    for event, (first, last) in zip(events(result.run_dir, "step"), [(0, 3), (3, 6), (6, 8)], strict=True):
        losses, counts = zip(*totals[first:last], strict=True)
        assert event["loss"] == pytest.approx(sum(losses) / sum(counts), rel=1e-6)


def test_the_recorded_gradient_norm_is_of_the_whole_gradient_before_clipping(
    train_tiny: Call, events: Call, pixels: Pixels
) -> None:
    torch.manual_seed(SEED)
    model = resnet()
    inputs, targets = pixels.batch(ids_of(0, 52))
    F.cross_entropy(model(inputs), targets).backward()
    norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))  # type: ignore[union-attr]
    for name, overrides in {"plain": {}, "clipped": {"optimizer.clip_norm": norm / 10}}.items():
        result = train_tiny(
            name, {"seed": SEED, "telemetry.log_every": "1 steps", "train.duration": "1 steps", **overrides}
        )
        assert events(result.run_dir, "step")[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)


# -------------------------------------------------------------------------------- accumulation is invisible


class Double(nn.Module):
    """A network in float64 without BatchNorm, so that the cut into micro-batches can only show in rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 3)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(x.double())
        return logits


ACCUMULATED: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer.lr": 0.5, "optimizer.nesterov": True},
    "adamw": {"optimizer.name": "adamw", "optimizer.lr": 0.01},
    "clipped and smoothed": {"optimizer.lr": 0.5, "optimizer.clip_norm": 0.05, "train.label_smoothing": 0.2},
}
# Every size with one of them: how a step is cut is nothing that a rule sees.
MICRO_SIZES = {"sgd": (8, 2, 1), "adamw": (4,), "clipped and smoothed": (4,)}


def largest_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    return max((first[key].double() - second[key].double()).abs().max().item() for key in first)


@pytest.mark.parametrize("case", ACCUMULATED)
@pytest.mark.everyday
def test_micro_batches_are_one_big_batch(
    case: str, train_tiny: Call, tiny_task: Call, weights: Call, events: Call
) -> None:
    # 53 samples: an epoch's last step has 5 of them, so 4, 8 and 16 micro-batches are ragged, or have none at all.
    task = tiny_task(train_images=53, make_network=Double)
    common = {
        "train.duration": "3 epochs",
        "train.ema": 0.5,
        "telemetry.log_every": "1 steps",
        "schedule.name": "cosine",
        **ACCUMULATED[case],
    }
    whole = train_tiny("whole", common, task=task)
    start = train_tiny("start", {**common, "train.duration": "1 steps"}, task=task)
    assert largest_difference(weights(whole), weights(start)) > 0.01
    for micro in MICRO_SIZES[case]:
        parts = train_tiny(f"micro-{micro}", {**common, "batch.micro_size": micro}, task=task)
        assert largest_difference(weights(parts), weights(whole)) <= 1e-12
        assert largest_difference(weights(parts, "ema"), weights(whole, "ema")) <= 1e-12
        assert parts.summary.step == whole.summary.step == 12
        for mine, theirs in zip(events(parts.run_dir, "step"), events(whole.run_dir, "step"), strict=True):
            assert mine["lr"] == theirs["lr"]
            assert mine["samples"] == theirs["samples"]
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-12)
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-10)


def test_micro_batches_in_float32(train_tiny: Call, tiny_task: Call, weights: Call) -> None:
    task = tiny_task(make_network=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.GELU(), nn.Linear(8, 3)))
    whole = train_tiny("whole", {"train.duration": "12 steps"}, task=task)
    for micro in (8, 4):
        parts = train_tiny(f"micro-{micro}", {"train.duration": "12 steps", "batch.micro_size": micro}, task=task)
        assert largest_difference(weights(parts), weights(whole)) <= 1e-6


def test_dropout_differs_between_steps_and_micro_batches(train_tiny: Call, tiny_task: Call) -> None:
    class Spy(nn.Dropout):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                masks.append(super().forward(torch.ones(64)).ne(0).tolist())
            return x

    masks: list[list[bool]] = []
    task = tiny_task(make_network=lambda: nn.Sequential(nn.Flatten(), Spy(), nn.Linear(64, 3)))
    for name in ("first", "second"):
        train_tiny(name, {"batch.micro_size": 8, "train.duration": "4 steps"}, task=task)
    first, second = masks[: len(masks) // 2], masks[len(masks) // 2 :]
    assert first == second
    assert len({tuple(mask) for mask in first}) == len(first) == 8
