"""On a GPU a loss that is no number moves nothing either (and no step waits to find out: test_cuda_training.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake

from paceline.errors import TrainingError

COMMON = {
    "parallel.device": "cuda",
    "telemetry.log_every": "20 steps",
    "checkpoint.every": "off",
    "evaluate.every": "off",
}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_device_leaves_the_update_out(
    train_tiny: Callable[..., Any], tiny_task: Callable[..., Any], optimizer: str
) -> None:
    # Records after steps 1, 2, 5 and 20: at a record the host sees the loss itself.
    made: list[nn.Module] = []

    def network() -> nn.Module:
        made.append(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)))
        return made[-1]

    def trained() -> nn.Module:  # another was made of fake tensors, on which a step's work is counted
        return [each for each in made if not is_fake(next(each.parameters()))][-1]

    task = tiny_task(make_network=network, on_loss=lambda b, loss: loss * float("nan") if b.slice.step == 6 else None)
    common = {**COMMON, "optimizer.name": optimizer}
    train_tiny("skip", {**common, "train.nonfinite": "skip", "train.duration": "9 steps"}, task=task)
    expected = trained()
    with pytest.raises(TrainingError, match="the training loss became nan at step 7;"):
        train_tiny("stop", {**common, "train.duration": "20 steps"}, task=task)
    for mine, theirs in zip(trained().parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
