"""LARS and LAMB that have no layer to scale are told, and not taken for what they are called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from golden_sentences import raises
from torch import nn

from paceline.errors import RecipeError
from paceline.host.world import World
from paceline.optim.build import build_optimizer
from paceline.plan import DataFacts, MachineFacts, make
from paceline.recipe.load import load_recipe
from paceline.recipe.schema import Recipe

FACTS = DataFacts(train_samples=100, evaluation_samples=10, description={"backend": "memory"})
MACHINE = MachineFacts(device="cpu", device_name="", fast_bf16=False, cores=1)


def unused(recipe: Recipe) -> dict[str, str]:
    return make(recipe, world=World(), data=FACTS, machine=MACHINE).unused


def recipe_of(optimizer: dict[str, Any]) -> Recipe:
    return load_recipe("digits", {"optimizer": None, **{f"optimizer.{k}": v for k, v in optimizer.items()}}).recipe


def told(**optimizer: Any) -> dict[str, str]:
    return unused(recipe_of(optimizer))


def moved(**optimizer: Any) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    rule = build_optimizer(model, recipe_of(optimizer).optimizer, torch.device("cpu"))
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    rule.step()
    return model.weight.detach()


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_without_decay_they_scale_nothing_and_that_is_said(name: str) -> None:
    plain = {"lars": "sgd", "lamb": "adamw"}[name]
    own = {"eps": 1e-6} if name == "lamb" else {}
    assert torch.allclose(moved(name=name, lr=0.1), moved(name=plain, lr=0.1, **own))
    assert f"it acts like {plain}" in told(name=name)["optimizer.name"]


@pytest.mark.parametrize("name", ["lars", "lamb"])
@pytest.mark.parametrize(
    "more", [{"weight_decay": 1e-4}, {"options": {"always_adapt": True}}, {"groups": {"fc.*": {"weight_decay": 0.1}}}]
)
def test_with_something_to_scale_nothing_is_said(name: str, more: dict[str, Any]) -> None:
    assert "optimizer.name" not in told(name=name, **more)
    assert "optimizer.name" not in told(name="sgd")


def test_an_override_that_means_nothing_is_refused() -> None:
    loaded = load_recipe("digits", {"optimizer": None, "optimizer.name": "lars"})
    with raises(RecipeError, key="optimizer.name", rule="with effect"):
        loaded.checked(unused(loaded.recipe))
