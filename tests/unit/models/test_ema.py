"""The moving average is its formula, for parameters and buffers alike, and leaves the model alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.checkpoint.manifest import read_components
from paceline.optim.build import ExponentialMovingAverage


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def shaken(model: nn.Module, step: int) -> None:
    torch.manual_seed(step)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor))
            else:
                tensor.add_(1)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.999])
def test_the_formula(decay: float) -> None:
    model = net()
    average = ExponentialMovingAverage(model, decay)
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    for step in range(30):
        shaken(model, step)
        average.update(step)
        kept = min(decay, (1 + step) / (10 + step))
        for key, value in model.state_dict().items():
            expected[key] = kept * expected[key] + (1 - kept) * value if value.is_floating_point() else value.clone()
    for key, value in average.module.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=1e-12, atol=1e-12)


def test_it_is_for_evaluation_and_has_no_gradients() -> None:
    average = ExponentialMovingAverage(net(), 0.9)
    assert not any(module.training for module in average.module.modules())
    assert not any(each.requires_grad for each in average.module.parameters())


def test_shared_weights_stay_shared() -> None:
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    average = ExponentialMovingAverage(tied, 0.5)
    with torch.no_grad():
        tied[0].weight.fill_(1.0)
    start = average.module[0].weight.clone()
    average.update(10)
    assert average.module[1].weight is average.module[0].weight
    torch.testing.assert_close(average.module[0].weight, start * 0.5 + 0.5)


def test_a_mask_of_infinities_stays() -> None:
    """The average of -inf and -inf would be nan."""
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    model.register_buffer("centre", torch.zeros(2))
    average = ExponentialMovingAverage(model, 0.5)
    model.centre += 1
    average.update(10)
    assert average.module.mask.tolist() == [0.0, -torch.inf]
    assert average.module.centre.tolist() == [0.5, 0.5]


def test_a_run_averages_the_weights_that_its_steps_leave(train_tiny: Callable[..., Any]) -> None:
    """Once per step of two micro-batches, and after it."""
    first: dict[str, torch.Tensor] = {}

    def network() -> nn.Module:
        made = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
        first.update({name: each.clone() for name, each in made.state_dict().items()})
        return made

    two_steps = {"train.duration": "2 steps", "batch.micro_size": 8, "train.ema": 0.9, "checkpoint.every": "1 steps"}
    run = train_tiny("a", {**two_steps, "evaluate.every": "off"}, make_network=network)
    average = first
    for step, kept in enumerate((1 / 10, 2 / 11), start=1):
        saved = read_components(run.run_dir / "checkpoints" / f"step-{step:08}", ("model", "ema"))
        for name, before in average.items():
            assert not torch.equal(before, saved["model"][name])
            torch.testing.assert_close(saved["ema"][name], kept * before + (1 - kept) * saved["model"][name])
        average = saved["ema"]
