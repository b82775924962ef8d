"""A run that is interrupted anywhere and continued ends with the bits, and the records, of one that was not."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import Call

from paceline.data.batch import Batch
from paceline.plugins.references import trusting_code
from paceline.recipe.load import load_recipe
from paceline.reports.audit import audit_run

STEPS = 7
# Everything that could carry hidden state at once. 52 samples in batches of 16: every fourth step is a tail of 4.
EVERYTHING = {
    "train.duration": f"{STEPS} steps",
    "train.precision": "bf16",
    "train.ema": 0.9,
    "train.label_smoothing": 0.1,
    "model.options.dropout": 0.3,
    "data.augment.crop": "pad",
    "data.augment.padding": 2,
    "data.augment.flip": 0.5,
    "batch.micro_size": 4,
    "optimizer.clip_norm": 1.0,
    "optimizer.weight_decay": 1e-3,
    "schedule.name": "cosine",
    "schedule.warmup": "3 steps",
    "telemetry.log_every": "2 steps",
    "evaluate.every": "2 steps",
    "checkpoint.every": "3 steps",
}
VARIANTS: dict[str, dict[str, Any]] = {
    "everything": EVERYTHING,
    "adamw": {
        "train.duration": f"{STEPS} steps",
        "optimizer.name": "adamw",
        "optimizer.lr": 1e-3,
        "train.precision": "fp32",
        "evaluate.every": "3 steps",
        "checkpoint.every": "off",
        "telemetry.log_every": "4 steps",
        "evaluate.patience": 3,
    },
    # Four steps of 16 and the tail, then two of up to 32, then one of all: what comes every epoch follows.
    "growing": {
        **EVERYTHING,
        "batch.growth": {1: 32, 2: 64},
        "optimizer.lr_scaling": "sqrt",
        "optimizer.lr_reference_batch": 16,
        "evaluate.every": "1 epochs",
        "checkpoint.every": "1 epochs",
    },
}
# Where a run of each is stopped: anywhere at all, and for the others before, at and after what only they do: AdamW's
# first counts, its evaluation of the third step, and the ends of the epochs after which batches grow.
STOPPED_AFTER = {"everything": range(1, STEPS), "adamw": (1, 3, 5), "growing": (3, 4, 6)}


class PowerCutError(Exception):
    """Stands for whatever ends a process in the middle of a step."""


def asked_to_stop_in(step: int, number: int = signal.SIGTERM) -> Callable[[Batch, torch.Tensor], None]:
    """Send this process a real signal while it is inside a step, counted from 1."""

    def on_loss(batch: Batch, loss: torch.Tensor) -> None:
        if batch.slice.step == step - 1 and batch.slice.is_last:
            os.kill(os.getpid(), number)

    return on_loss


def cut_off_in(step: int) -> Callable[[Batch, torch.Tensor], None]:
    """Fail in the last micro-batch of a step, counted from 1: no chance to save anything."""

    def on_loss(batch: Batch, loss: torch.Tensor) -> None:
        if batch.slice.step == step - 1 and batch.slice.is_last:
            raise PowerCutError

    return on_loss


def same_end(whole: Any, pieces: Any, course: Call) -> None:
    assert pieces.status == "completed"
    assert pieces.summary.weights_sha256 == whole.summary.weights_sha256
    assert pieces.summary.ema_sha256 == whole.summary.ema_sha256
    assert pieces.summary.metrics == whole.summary.metrics
    assert course(pieces.run_dir) == course(whole.run_dir)
    assert audit_run(pieces.run_dir).passed
    ledger = (whole.run_dir / "ledger" / "rank-00000.ids").read_bytes()
    assert (pieces.run_dir / "ledger" / "rank-00000.ids").read_bytes() == ledger


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.everyday
def test_stopped_after_any_step(
    variant: str, train_tiny: Call, train_shared: Call, tiny_task: Call, course: Call
) -> None:
    overrides = VARIANTS[variant]
    whole = train_shared(overrides)
    assert whole.summary.step == STEPS
    for step in STOPPED_AFTER[variant]:
        name = f"stopped-{step}"
        stopped = train_tiny(name, overrides, task=tiny_task(on_loss=asked_to_stop_in(step)))
        assert (stopped.status, stopped.summary.step) == ("stopped", step)
        pieces = train_tiny(name, overrides)
        assert pieces.summary.resumes == 1
        same_end(whole, pieces, course)


@pytest.mark.everyday
def test_cut_off_in_any_step(train_tiny: Call, train_shared: Call, tiny_task: Call, course: Call) -> None:
    # Saved every third step only, so that there is always something to be done, and written, again.
    overrides = {**EVERYTHING, "checkpoint.keep_best": False}
    whole = train_shared(overrides)
    for step in range(1, STEPS + 1):
        name = f"cut-{step}"
        with pytest.raises(PowerCutError):
            train_tiny(name, overrides, task=tiny_task(on_loss=cut_off_in(step)))
        same_end(whole, train_tiny(name, overrides), course)


PARTS = """
import torch

class Leaky(torch.optim.Optimizer):
    def __init__(self, params, lr, keep=0.5, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "keep": keep, "weight_decay": weight_decay, "seen": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["seen"] = group["keep"] * group["seen"] + 1
            for each in (each for each in group["params"] if each.grad is not None):
                state = self.state[each]
                state["count"] = state.get("count", 0) + 1
                mean = state.setdefault("mean", torch.zeros_like(each)).mul_(group["keep"]).add_(each.grad)
                each.mul_(1 - group["lr"] * group["weight_decay"])
                each.sub_(mean, alpha=group["lr"] / (group["seen"] + state["count"]))

def sawtooth(rate, step):
    return rate.peak / (1 + step % 2)

class Brier:
    def __init__(self, power):
        self.power = power

    def __call__(self, logits, targets):
        return (logits.softmax(dim=1) - targets).abs().pow(self.power).sum(dim=1)
"""


def test_cut_off_with_one_s_own_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_tiny: Call, tiny_task: Call, course: Call
) -> None:
    (tmp_path / "parts.py").write_text(PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    own = {"optimizer.name": "parts:Leaky", "schedule.name": "parts:sawtooth", "train.loss": "parts:Brier"}
    overrides = {**EVERYTHING, **own, "optimizer.options.keep": 0.9, "train.loss_options.power": 1.5}
    whole = train_tiny("whole", overrides)
    for step in (2, 5):
        with pytest.raises(PowerCutError):
            train_tiny(f"cut-{step}", overrides, task=tiny_task(on_loss=cut_off_in(step)))
        same_end(whole, train_tiny(f"cut-{step}", overrides), course)
    with trusting_code():
        stored = load_recipe(whole.run_dir).recipe
    assert {stored.optimizer.name, stored.schedule.name, stored.train.loss} == set(own.values())
    assert (stored.optimizer.options, stored.train.loss_options) == ({"keep": 0.9}, {"power": 1.5})


def test_stopped_after_every_step(train_tiny: Call, train_shared: Call, tiny_task: Call, course: Call) -> None:
    whole = train_shared(EVERYTHING)
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    for step in range(1, STEPS):
        task = tiny_task(on_loss=asked_to_stop_in(step, signals[step % len(signals)]))
        assert train_tiny("pieces", EVERYTHING, task=task).status == "stopped"
    pieces = train_tiny("pieces", EVERYTHING)
    assert pieces.summary.resumes == STEPS - 1
    same_end(whole, pieces, course)


def test_cut_off_twice_in_one_epoch_and_stopped_between(
    train_tiny: Call, train_shared: Call, tiny_task: Call, course: Call
) -> None:
    whole = train_shared(EVERYTHING)
    for step in (5, 6):
        with pytest.raises(PowerCutError):
            train_tiny("pieces", EVERYTHING, task=tiny_task(on_loss=cut_off_in(step)))
    train_tiny("pieces", EVERYTHING, task=tiny_task(on_loss=asked_to_stop_in(6)))
    with pytest.raises(PowerCutError):
        train_tiny("pieces", EVERYTHING, task=tiny_task(on_loss=cut_off_in(7)))
    last = train_tiny("pieces", EVERYTHING)
    assert last.summary.resumes == 4  # two of which no checkpoint had been saved after
    same_end(whole, last, course)


def test_cut_off_in_an_evaluation(train_tiny: Call, train_shared: Call, tiny_task: Call, course: Call) -> None:
    def fail(*_: Any) -> None:
        raise PowerCutError

    whole = train_shared(EVERYTHING)
    train_tiny("pieces", EVERYTHING, task=tiny_task(on_loss=asked_to_stop_in(3)))
    with pytest.raises(PowerCutError):
        train_tiny("pieces", EVERYTHING, task=tiny_task(on_score=fail))
    same_end(whole, train_tiny("pieces", EVERYTHING), course)


def test_cut_off_after_going_back(train_tiny: Call, train_shared: Call, tiny_task: Call, course: Call) -> None:
    """The later checkpoints of the first time are gone: to resume from one of them would leave a gap in the records."""
    overrides = {**EVERYTHING, "checkpoint.keep": 9}
    whole = train_shared(overrides)
    checkpoint = train_tiny("back", overrides).run_dir / "checkpoints" / "step-00000003"
    with pytest.raises(PowerCutError):
        train_tiny("back", overrides, resume=str(checkpoint), task=tiny_task(on_loss=cut_off_in(5)))
    same_end(whole, train_tiny("back", overrides), course)


# Scales far too high for fp16: the first batches overflow, one at a time, until the scale has come down; and with
# an interval of three steps it rises and overflows again later.
OVERFLOWING = {
    "train.duration": "14 steps",
    "train.precision": "fp16",
    "train.grad_scaler.init_scale": 2.0**26,
    "train.grad_scaler.growth_interval": 3,
    "train.grad_scaler.growth_factor": 4.0,
    "train.ema": 0.9,
    "schedule.name": "linear",
    "telemetry.log_every": "1 steps",
    "evaluate.every": "2 steps",
    "checkpoint.every": "3 steps",
    "optimizer.clip_norm": 1.0,
}


def test_stopped_or_cut_off_among_overflowing_steps(
    train_tiny: Call, train_shared: Call, tiny_task: Call, course: Call
) -> None:
    whole = train_shared(OVERFLOWING)
    assert 0 < whole.summary.step < 13
    for position in (1, 4, 10):
        name = f"stopped-{position}"
        train_tiny(name, OVERFLOWING, task=tiny_task(on_loss=asked_to_stop_in(position)))
        same_end(whole, train_tiny(name, OVERFLOWING), course)
    for position in (2, 8, 14):
        name = f"cut-{position}"
        with pytest.raises(PowerCutError):
            train_tiny(name, OVERFLOWING, task=tiny_task(on_loss=cut_off_in(position)))
        same_end(whole, train_tiny(name, OVERFLOWING), course)
