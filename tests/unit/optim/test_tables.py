"""Tables are moved by their own rule, alike with sparse and dense gradients; what does not go is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from paceline.optim.classes import RowwiseAdagrad, check_tables
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.checkpoint.state import OptimizerComponent
from paceline.errors import ModelError, RecipeError
from paceline.optim.build import Clipping, build_optimizer
from paceline.recipe.load import stored_recipe
from paceline.recipe.training import Optimizer
from paceline_recsys.networks import Dlrm

CPU = torch.device("cpu")


def network(*, sparse: bool) -> Dlrm:
    torch.manual_seed(0)
    return Dlrm(3, (10, 20), embedding=4, bottom=(5,), top=(6,), sparse=sparse)


def train(model: Dlrm, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        torch.manual_seed(100 + step)
        dense, categories = torch.randn(8, 3), torch.randint(0, 4, (8, 2))  # rows are used several times, others never
        model(dense, categories).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def trained(asked: Optimizer, *, sparse: bool, steps: int = 6) -> dict[str, torch.Tensor]:
    model = network(sparse=sparse)
    train(model, build_optimizer(model, asked, CPU), 0, steps)
    return model.state_dict()


ROWWISE = Optimizer(name="adamw", lr=0.05, tables="rowwise_adagrad", weight_decay=0.1)


@pytest.mark.parametrize("asked", [ROWWISE, Optimizer(name="sgd", lr=0.1, momentum=0.0)])
def test_sparse_and_dense_gradients_come_to_the_same(asked: Optimizer) -> None:
    sparse, dense = trained(asked, sparse=True), trained(asked, sparse=False)
    for name, tensor in dense.items():
        torch.testing.assert_close(sparse[name], tensor, rtol=1e-5, atol=1e-6)
    untouched = network(sparse=False).tables[1].weight[4:]
    assert (dense["tables.1.weight"][4:] == untouched).all()  # neither moved nor decayed


def test_rowwise_adagrad_by_hand() -> None:
    table = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    optimizer = RowwiseAdagrad([{"params": [table]}], lr=0.5)
    for gradient in ([[3.0, 1.0], [0.0, 0.0]], [[2.0, 4.0], [0.0, 0.0]]):
        table.grad = torch.tensor(gradient)
        optimizer.step()
    # Sums of mean squares: 5, then 5 + 10.
    expected = [1 - 0.5 * 3 / 5**0.5 - 0.5 * 2 / 15**0.5, 2 - 0.5 * 1 / 5**0.5 - 0.5 * 4 / 15**0.5]
    torch.testing.assert_close(table[0].detach(), torch.tensor(expected))
    assert table[1].tolist() == [3, 4]


@pytest.mark.parametrize("tables", ["rowwise_adagrad", "sparse_adam"])
def test_its_state_is_saved_and_comes_back(tables: Any) -> None:
    asked = Optimizer(name="adamw", lr=0.05, tables=tables)
    whole = trained(asked, sparse=True)
    begun = network(sparse=True)
    first = build_optimizer(begun, asked, CPU)
    train(begun, first, 0, 3)
    saved = OptimizerComponent(first).state_dict()
    resumed = network(sparse=True)
    resumed.load_state_dict(begun.state_dict())
    second = build_optimizer(resumed, asked, CPU)
    OptimizerComponent(second).load_state_dict(saved)
    train(resumed, second, 3, 6)
    for name, tensor in resumed.state_dict().items():
        assert torch.equal(tensor, whole[name]), name


def test_two_optimizers_step_as_one() -> None:
    model, seen = network(sparse=True), []
    optimizer = build_optimizer(model, ROWWISE, CPU)
    handle = register_optimizer_step_pre_hook(lambda stepping, *_: seen.append(stepping))
    train(model, optimizer, 0, 2)
    handle.remove()
    assert seen == [optimizer, optimizer]


def test_groups_reach_the_tables() -> None:
    asked = Optimizer(name="adamw", lr=0.05, tables="rowwise_adagrad", groups={"tables.*": {"lr_factor": 10.0}})
    groups = build_optimizer(network(sparse=False), asked, CPU).param_groups
    factors = {len(group["params"]): (group["lr_factor"], "betas" in group) for group in groups}
    assert factors[2] == (10.0, False)
    assert all(uses_adam for tensors, (_, uses_adam) in factors.items() if tensors != 2)


def test_the_norm_of_a_sparse_gradient_is_that_of_the_dense_one() -> None:
    norms = []
    for sparse in (True, False):
        model = network(sparse=sparse)
        torch.manual_seed(1)
        model(torch.randn(8, 3), torch.zeros(8, 2, dtype=torch.int64)).sum().backward()
        found = Clipping(model, Optimizer())(measure=True)
        assert found is not None
        norms.append(found.item())
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def check(tree: dict[str, Any], *, sparse: bool = True, strategy: str = "single", device: str = "cpu") -> None:
    tree.setdefault("optimizer", {}).setdefault("name", "sgd")
    if tree["optimizer"]["name"] == "sgd":
        tree["optimizer"].setdefault("momentum", 0.0)
    check_tables(network(sparse=sparse), stored_recipe(tree, "x"), strategy=strategy, device=device)


def test_what_goes_with_sparse_gradients() -> None:
    check({})
    check({}, strategy="ddp")
    check({"optimizer": {"name": "adamw", "weight_decay": 0.1, "tables": "sparse_adam"}, "train": {"ema": 0.9}})
    check({"optimizer": {"name": "adamw", "tables": "rowwise_adagrad"}}, sparse=False, strategy="exact")


@pytest.mark.parametrize(
    ("tree", "options", "said"),
    [
        ({}, {"strategy": "exact"}, "parallel.exact=true"),
        ({}, {"strategy": "fsdp"}, "parallel.strategy=fsdp"),
        ({}, {"strategy": "ddp", "device": "cuda"}, "parallel.strategy=ddp on cuda"),
        ({"optimizer": {"momentum": 0.9}}, {}, "optimizer.name=sgd with momentum 0.9"),
        ({"optimizer": {"name": "adamw"}}, {}, "optimizer.name=adamw"),
        ({"optimizer": {"weight_decay": 0.1, "decay_norm_and_bias": True}}, {}, "optimizer.decay_norm_and_bias"),
        ({"optimizer": {"clip_norm": 1.0}}, {}, "optimizer.clip_norm"),
        ({"telemetry": {"noise_scale": "5 steps"}}, {}, "telemetry.noise_scale"),
        ({"parallel": {"gradient_compression": "bf16"}}, {"strategy": "ddp"}, "parallel.gradient_compression=bf16"),
        ({"model": {"compile": True}}, {}, "model.compile=true"),
        ({"train": {"precision": "fp16"}}, {}, "train.precision=fp16"),
        ({"optimizer": {"name": "adamw", "tables": "sparse_adam"}}, {"sparse": False}, "needs sparse gradients"),
        ({"optimizer": {"tables": "rowwise_adagrad"}}, {"sparse": False, "strategy": "fsdp"}, "needs whole tables"),
    ],
)
def test_what_does_not_is_refused_by_name(tree: dict[str, Any], options: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(said)):
        check(tree, **options)


def test_a_network_without_tables() -> None:
    recipe = stored_recipe({"optimizer": {"tables": "rowwise_adagrad"}}, "x")
    with pytest.raises(ModelError, match="has no embedding tables"):
        check_tables(nn.Linear(2, 2), recipe, strategy="single", device="cpu")
