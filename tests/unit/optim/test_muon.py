"""Muon with SGD for the rest: the published iteration, written out here in plain loops, and torch's own SGD."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import ModelError, RecipeError
from paceline.optim.build import apply_settings, build_optimizer
from paceline.optim.classes import orthogonalised
from paceline.optim.parameter_groups import describe_groups
from paceline.plan.rates import OptimizerSettings
from paceline.recipe.load import stored_recipe
from paceline.recipe.training import Optimizer

CPU = torch.device("cpu")


def section(**options: Any) -> Optimizer:
    asked = {"name": "muon", "rest": "sgd", **options}
    return stored_recipe({}, "plain", {f"optimizer.{key}": value for key, value in asked.items()}).optimizer


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(64, 3))


def gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for each in model.parameters():
        each.grad = torch.randn(each.shape, generator=generator)


def by_hand(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """Jordan et al. 2024 on the singular values alone: a s + b s^3 + c s^5, in float64."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm()
    for _ in range(steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ torch.diag(values) @ right


@pytest.mark.parametrize("shape", [(6, 18), (18, 6), (8, 8), (1, 9), (40, 3)])
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_the_iteration_is_the_published_polynomial_of_the_singular_values(shape: tuple[int, int], steps: int) -> None:
    matrix = 100 * torch.randn(shape, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(orthogonalised(matrix, steps).double(), by_hand(matrix, steps), rtol=1e-3, atol=2e-4)
    assert not orthogonalised(torch.zeros(shape), steps).any()


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("unit_filters", [False, True])
def test_several_steps_are_the_published_ones(nesterov: bool, unit_filters: bool) -> None:
    model = net()
    rest: dict[str, Any] = {"rest_momentum": 0.85, "rest_lr_factor": 3, "newton_schulz_steps": 3, "weight_decay": 0.2}
    asked = section(lr=0.1, momentum=0.6, nesterov=nesterov, unit_filters=unit_filters, **rest)
    optimizer = build_optimizer(model, asked, CPU)
    plain = {name: each.detach().clone() for name, each in model.named_parameters()}
    buffers = {name: torch.zeros_like(each) for name, each in plain.items()}
    for step in range(3):
        gradients(model, step)
        for name, each in model.named_parameters():
            weights, is_filter = plain[name], each.ndim == 4
            gradient = each.grad if is_filter or each.ndim == 1 else each.grad + 0.2 * weights
            momentum = 0.6 if is_filter else 0.85
            buffers[name] = momentum * buffers[name] + gradient
            ahead = gradient + momentum * buffers[name] if nesterov else buffers[name]
            if not is_filter:
                plain[name] = weights - 0.3 * ahead
                continue
            weights = weights * len(weights) ** 0.5 / weights.norm() if unit_filters else weights * (1 - 0.1 * 0.2)
            plain[name] = weights - 0.1 * by_hand(ahead.flatten(1), 3).float().view_as(weights)
        apply_settings(optimizer, OptimizerSettings(learning_rate=0.1, momentum=None, weight_decay=None))
        optimizer.step()
    for name, each in model.named_parameters():
        torch.testing.assert_close(each.detach(), plain[name], rtol=1e-4, atol=1e-4)


def test_the_plan_says_what_moves_how() -> None:
    asked = section(rest_lr_factor=5, weight_decay=0.1, groups={"4.weight": {"lr_factor": 2, "weight_decay": 0}})
    told = {
        (each.parameters, each.lr_factor, each.weight_decay, each.tensors) for each in describe_groups(net(), asked)
    }
    rest = ("norms, biases and exempt, by sgd", 5.0, 0.0, 5)
    assert told == {("filters", 1.0, 0.1, 2), rest, ("4.weight", 10.0, 0.0, 1)}


def test_decay_that_scaled_filters_would_not_show_is_not_told_and_not_taken() -> None:
    asked = section(unit_filters=True, weight_decay=0.1)
    assert {each.parameters: each.weight_decay for each in describe_groups(net(), asked)} == {
        "filters": 0.0,
        "norms, biases and exempt, by sgd": 0.0,
        "weights, by sgd": 0.1,
    }
    told = section(unit_filters=True, groups={"*.weight": {"weight_decay": 0.1}})
    with pytest.raises(ModelError, match=r"'\*\.weight' gives the filter 0\.weight weight decay"):
        describe_groups(net(), told)
    plain = section(unit_filters=True, weight_decay=0.1, groups={"*.weight": {"lr_factor": 2}})
    assert [each.tensors for each in describe_groups(net(), plain) if each.weight_decay > 0] == [1]


def test_the_schedule_s_momentum_is_that_of_the_orthogonal_steps() -> None:
    optimizer = build_optimizer(net(), section(lr=0.1, rest_lr_factor=4, rest_momentum=0.7), CPU)
    apply_settings(optimizer, OptimizerSettings(learning_rate=0.05, momentum=0.5, weight_decay=None))
    found = {(group["lr"], group["momentum"]) for group in optimizer.param_groups}
    assert found == {(0.05, 0.5), (0.2, 0.7)}


def test_a_network_without_filters_is_refused_and_one_of_filters_alone_is_not() -> None:
    with pytest.raises(ModelError, match=r"this network trains none; use optimizer\.rest=adamw"):
        build_optimizer(nn.Linear(3, 3), section(), CPU)
    build_optimizer(nn.Conv2d(2, 2, 3, bias=False), section(), CPU)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"rest": "adamw", "rest_momentum": 0.5}, "optimizer.rest_momentum"),
        ({"name": "sgd", "rest": None, "unit_filters": True}, "optimizer.unit_filters"),
        ({"betas": [0.9, 0.9]}, "they are for rest=adamw"),
        ({"options": {"ns_steps": 3}}, "they are for the class of rest=adamw"),
        ({"nesterov": True, "rest_momentum": 0}, "Nesterov momentum needs both above 0"),
        ({"nesterov": True, "momentum": 0}, "Nesterov momentum needs both above 0"),
    ],
)
def test_what_has_no_effect_is_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        section(**asked)


def test_channels_last_filters_move_as_others_do() -> None:
    plain, last = net(), net().to(memory_format=torch.channels_last)
    for model in (plain, last):
        optimizer = build_optimizer(model, section(lr=0.1), CPU)
        for step in range(2):
            gradients(model, step)
            optimizer.step()
    for mine, theirs in zip(last.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert last[2].weight.is_contiguous(memory_format=torch.channels_last)
