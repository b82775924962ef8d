"""Which parameters decay, and that the optimizers are torch's own to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.optim.build import build_optimizer, parameter_groups, set_learning_rate
from paceline.recipe.load import stored_recipe
from paceline.recipe.training import Optimizer

CPU = torch.device("cpu")


def section(**options: Any) -> Optimizer:
    return stored_recipe({}, "plain", {f"optimizer.{key}": value for key, value in options.items()}).optimizer


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 3))


def names_of(model: nn.Module, parameters: list[nn.Parameter]) -> set[str]:
    return {name for name, each in model.named_parameters() if any(each is one for one in parameters)}


def test_biases_and_norms_do_not_decay() -> None:
    model = net()
    decayed, free = parameter_groups(model, section(weight_decay=0.1))
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    assert names_of(model, decayed["params"]) == {"0.weight", "3.weight"}
    assert names_of(model, free["params"]) == {"0.bias", "1.weight", "1.bias", "3.bias"}


class Tokens(nn.Module):
    """Says itself what should not decay, as timm's transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.ones(1, 4, 3))
        self.blocks = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        self.head = nn.Linear(3, 2)

    def no_weight_decay(self) -> set[str]:
        return {"position", "blocks.1.*"}


def test_what_the_network_exempts_does_not_decay() -> None:
    model = Tokens()
    decayed, free = parameter_groups(model, section(weight_decay=0.1))
    assert names_of(model, decayed["params"]) == {"blocks.0.weight", "head.weight"}
    assert "position" in names_of(model, free["params"])
    (group,) = parameter_groups(model, section(weight_decay=0.1, decay_norm_and_bias=True))
    assert len(group["params"]) == 7


def test_a_network_inside_another_is_asked_too() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Tokens())
    decayed, _ = parameter_groups(model, section(weight_decay=0.1))
    assert names_of(model, decayed["params"]) == {"0.weight", "1.blocks.0.weight", "1.head.weight"}


def test_a_published_transformer_decays_what_its_own_library_would() -> None:
    timm = pytest.importorskip("timm")
    from timm.optim import param_groups_weight_decay

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=3)
    theirs = param_groups_weight_decay(model, 0.1, no_weight_decay_list=model.no_weight_decay())
    expected = {group["weight_decay"]: names_of(model, group["params"]) for group in theirs}
    ours = parameter_groups(model, section(weight_decay=0.1))
    assert {group["weight_decay"]: names_of(model, group["params"]) for group in ours} == expected
    assert "pos_embed" in expected[0.0]


def test_they_do_if_asked() -> None:
    (group,) = parameter_groups(net(), section(weight_decay=0.1, decay_norm_and_bias=True))
    assert group["weight_decay"] == 0.1
    assert len(group["params"]) == 6


def test_without_decay_there_is_one_group() -> None:
    (group,) = parameter_groups(net(), section())
    assert len(group["params"]) == 6


def test_frozen_parameters_are_left_out() -> None:
    model = net()
    model[0].requires_grad_(requires_grad=False)
    groups = parameter_groups(model, section(weight_decay=0.1))
    assert names_of(model, [each for group in groups for each in group["params"]]) == {
        "1.weight",
        "1.bias",
        "3.weight",
        "3.bias",
    }


def test_an_empty_group_is_left_out() -> None:
    assert len(parameter_groups(nn.BatchNorm1d(3), section(weight_decay=0.1))) == 1


def test_shared_parameters_come_once() -> None:
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    groups = parameter_groups(tied, section(weight_decay=0.1))
    assert sum(len(group["params"]) for group in groups) == 3


PLAIN = {
    "sgd": ({"momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "sgd without momentum": ({"momentum": 0}, lambda p: torch.optim.SGD(p, lr=0.1)),
    "nesterov": (
        {"momentum": 0.8, "nesterov": True, "weight_decay": 0.01, "decay_norm_and_bias": True},
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.01),
    ),
    "adamw": (
        {"name": "adamw", "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.05, "decay_norm_and_bias": True},
        lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.05),
    ),
    "adamw without decay": ({"name": "adamw"}, lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0)),
}


@pytest.mark.parametrize("name", PLAIN)
def test_it_is_torchs_own_to_the_bit(name: str) -> None:
    options, make = PLAIN[name]
    ours, plain = net(), net()
    optimizers = build_optimizer(ours, section(**options), CPU), make(plain.parameters())
    generator = torch.Generator().manual_seed(1)
    for step in range(20):
        for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            theirs.grad = mine.grad.clone()
        for optimizer in optimizers:
            set_learning_rate(optimizer, 0.1 / (step + 1))
            optimizer.step()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_every_group_gets_the_rate() -> None:
    optimizer = build_optimizer(net(), section(weight_decay=0.1), CPU)
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


def test_nesterov_without_momentum_is_refused_as_a_users_mistake() -> None:
    from paceline.errors import RecipeError

    with pytest.raises(RecipeError, match="nesterov"):
        build_optimizer(net(), section(momentum=0, nesterov=True), CPU)
