"""A converted recipe moves rates and weights as timm's own schedulers and optimizers do."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch
from timm.optim import create_optimizer_v2, optimizer_kwargs
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler_factory import scheduler_kwargs
from torch import nn

from paceline.host.world import World
from paceline.optim.build import build_optimizer
from paceline.plan import DataFacts, MachineFacts, make
from paceline.plan.rates import LearningRate
from paceline.recipe.load import stored_recipe
from paceline.recipe.schema import Recipe
from paceline_ops.imports.timm import TIMM, InputSettings, convert_timm, read_timm

_BATCH, _STEPS_PER_EPOCH = 10, 7


def both(words: str) -> tuple[Namespace, Recipe]:
    """What train.py has after parsing, and the recipe."""
    source, given = read_timm([f"train.py /d -b {_BATCH} {words}"])
    conversion = convert_timm(source, given, InputSettings())
    assert conversion.refused == ()
    recipe = stored_recipe(conversion.tree, "the test")
    defaults = {key: option.default for key, option in TIMM.options.items()}
    return Namespace(**{**defaults, **given, "lr": recipe.optimizer.lr}), recipe


def rates_of_timm(arguments: Namespace) -> list[float]:
    """The rate of every step of train.py's loop."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=arguments.lr)
    scheduler, epochs = create_scheduler_v2(
        optimizer, **scheduler_kwargs(arguments), updates_per_epoch=_STEPS_PER_EPOCH
    )
    rates = []
    for epoch in range(epochs):
        for update in range(_STEPS_PER_EPOCH):
            rates.append(optimizer.param_groups[0]["lr"])
            scheduler.step_update(epoch * _STEPS_PER_EPOCH + update + 1)
        scheduler.step(epoch + 1)
    return rates


def rates_here(recipe: Recipe) -> list[float]:
    data = DataFacts(train_samples=_BATCH * _STEPS_PER_EPOCH, evaluation_samples=0)
    machine = MachineFacts(device="cpu", device_name="a CPU", fast_bf16=False, cores=1)
    plan = make(recipe, world=World(), data=data, machine=machine)
    rate = LearningRate.of(recipe.schedule, plan)
    return [rate(step) for step in range(plan.total_steps)]


@pytest.mark.parametrize(
    "words",
    [
        "--sched-on-updates --epochs 12 --warmup-epochs 3 --warmup-prefix --lr 0.5 --warmup-lr 0.01 --min-lr 0.001",
        "--sched-on-updates --epochs 12 --warmup-epochs 0 --lr 0.5 --min-lr 0.001",
        "--sched-on-updates --epochs 4 --warmup-epochs 2 --warmup-prefix --lr-cycle-limit 3 --lr-cycle-decay 1 --lr 1",
        "--sched-on-updates --epochs 9 --warmup-epochs 0 --sched poly --decay-rate 1.5 --lr 0.5",
        "--sched-on-updates --epochs 9 --warmup-epochs 2 --sched step --decay-epochs 2 --decay-rate 0.7 --lr 0.5",
        "--sched-on-updates --epochs 9 --warmup-epochs 2 --warmup-prefix --sched step --decay-epochs 2 --lr 0.5",
        "--sched-on-updates --epochs 9 --warmup-epochs 9 --lr 0.5",
        "--epochs 12 --warmup-epochs 0 --sched step --decay-epochs 2.4 --decay-rate 0.9 --lr 0.5",
        "--epochs 12 --warmup-epochs 0 --sched step --decay-epochs 3 --decay-rate 0.9 --lr 0.5",
        "--epochs 12 --warmup-epochs 0 --sched multistep --decay-milestones 4 8 --lr 0.5",
    ],
)
def test_the_rate_of_every_step_is_timms(words: str) -> None:
    arguments, recipe = both(words)
    theirs, ours = rates_of_timm(arguments), rates_here(recipe)
    assert len(ours) == len(theirs)
    assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    "words",
    [
        "--epochs 12 --warmup-epochs 3 --sched step --decay-epochs 2.4 --decay-rate 0.9 --lr 0.5",
        "--epochs 12 --warmup-epochs 3 --sched multistep --decay-milestones 4 8 --lr 0.5",
        "--epochs 12 --warmup-epochs 3 --warmup-prefix --sched step --decay-epochs 2.4 --decay-rate 0.9 --lr 0.5",
    ],
)
def test_after_a_warm_up_by_epochs_every_step_is_timms(words: str) -> None:
    arguments, recipe = both(words)
    theirs, ours = rates_of_timm(arguments), rates_here(recipe)
    begin = arguments.warmup_epochs * _STEPS_PER_EPOCH
    assert len(ours) == len(theirs)
    assert ours[begin:] == pytest.approx(theirs[begin:], rel=1e-6)
    # And in the warm-up where an epoch begins, which is where timm moves it.
    assert ours[:begin:_STEPS_PER_EPOCH] == pytest.approx(theirs[:begin:_STEPS_PER_EPOCH], rel=1e-6)


class Small(nn.Module):
    """Something to move, with a norm and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.last(self.norm(self.first(inputs)).relu())
        return made


def moved(optimizer_of: Any, clip: float | None) -> list[torch.Tensor]:
    """Weights after some steps on the same numbers."""
    torch.manual_seed(0)
    network = Small()
    optimizer = optimizer_of(network)
    draws = torch.Generator().manual_seed(1)
    for _ in range(4):
        inputs, targets = torch.randn(16, 6, generator=draws), torch.randint(3, (16,), generator=draws)
        optimizer.zero_grad()
        nn.functional.cross_entropy(20 * network(inputs), targets).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(network.parameters(), clip)
        optimizer.step()
    return [each.detach().clone() for each in network.parameters()]


@pytest.mark.parametrize(
    "words",
    [
        "--opt sgd --lr 0.1 --weight-decay 0.01",
        "--opt momentum --lr 0.1 --momentum 0.8",
        "--opt adamw --lr 0.01 --weight-decay 0.1 --opt-betas 0.8 0.99 --opt-eps 1e-6",
        "--opt lamb --lr 0.01 --weight-decay 0.1",
        "--opt lamb --lr 0.01 --weight-decay 0.1 --opt-kwargs max_grad_norm=0.1",
        "--opt rmsproptf --lr 0.01 --weight-decay 1e-3 --opt-eps 0.001",
        "--opt rmsprop --lr 0.01",
        "--opt lion --lr 0.001 --weight-decay 0.1",
        "--opt lars --lr 0.1 --weight-decay 0.1",
        "--opt nlars --lr 0.1 --weight-decay 0.1",
        "--opt muon --lr 0.01 --weight-decay 0.1",
        "--opt nmuon --lr 0.01",
    ],
)
def test_weights_move_as_with_timms_optimizer(words: str) -> None:
    arguments, recipe = both(words)
    theirs = moved(
        lambda network: create_optimizer_v2(network, **optimizer_kwargs(arguments), **arguments.opt_kwargs), None
    )
    mine = recipe.optimizer
    ours = moved(lambda network: build_optimizer(network, mine, torch.device("cpu")), mine.clip_norm)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
