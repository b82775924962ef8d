"""Does an optimizer go on exactly where it stopped, and is a state of another one refused?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from paceline.checkpoint.components import load_optimizer_state
from paceline.checkpoint.store import CheckpointStore, read_component
from paceline.errors import CheckpointError

Build = Callable[[nn.Module], Optimizer]


def momentum(model: nn.Module) -> Optimizer:
    decay = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    rest = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return SGD(groups, lr=0.1, momentum=0.9, nesterov=True)


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-2, amsgrad=True)


def adamw_tensor_lr(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=torch.tensor(1e-2), foreach=False)


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    return model.to(dtype, memory_format=torch.channels_last)


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    dtype = next(model.parameters()).dtype
    for step in steps:
        images = torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(step)).to(dtype)
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()


def tensors_of(optimizer: Optimizer) -> list[tuple[object, str, torch.Tensor]]:
    state = optimizer.state_dict()["state"]
    return [(index, key, value) for index in state for key, value in sorted(state[index].items())]


def assert_same_state(left: Optimizer, right: Optimizer) -> None:
    pairs = list(zip(tensors_of(left), tensors_of(right), strict=True))
    assert pairs
    for (index, key, one), (other_index, other_key, other) in pairs:
        assert (index, key) == (other_index, other_key)
        assert one.dtype == other.dtype, f"{key} of parameter {index}"
        assert torch.equal(one, other), f"{key} of parameter {index}"


def saved_state(optimizer: Optimizer, directory: Path) -> dict[str, Any]:
    return read_component(
        CheckpointStore(directory).save(1, {"optimizer": optimizer.state_dict()}, {}).path, "optimizer"
    )


@pytest.mark.parametrize("build", [momentum, adamw, adamw_tensor_lr])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_optimizer_makes_the_same_steps(tmp_path: Path, build: Build, dtype: torch.dtype) -> None:
    model = network(dtype)
    optimizer = build(model)
    train(model, optimizer, range(3))
    resumed = network(dtype)
    resumed.load_state_dict(model.state_dict())
    restored = build(resumed)
    load_optimizer_state(restored, saved_state(optimizer, tmp_path))
    assert_same_state(optimizer, restored)
    train(model, optimizer, range(3, 6))
    train(resumed, restored, range(3, 6))
    assert_same_state(optimizer, restored)
    assert all(map(torch.equal, model.parameters(), resumed.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_moments_over_bfloat16_parameters_keep_every_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    model = network(torch.bfloat16)
    optimizer = adamw(model)
    train(model, optimizer, range(1))
    for state in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = torch.rand(state[key].shape, dtype=torch.float64).to(dtype)
    restored = adamw(network(torch.bfloat16))
    load_optimizer_state(restored, saved_state(optimizer, tmp_path))
    assert_same_state(optimizer, restored)


def test_moments_take_the_memory_format_of_their_parameter(tmp_path: Path) -> None:
    model = network()
    optimizer = adamw(model)
    train(model, optimizer, range(1))
    fresh = network()
    restored = adamw(fresh)
    load_optimizer_state(restored, saved_state(optimizer, tmp_path))
    weight = next(fresh.parameters())
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert restored.state[weight]["exp_avg"].stride() == weight.stride()


def test_the_restored_state_shares_no_memory_with_the_saved_one() -> None:
    model = network()
    optimizer = adamw(model)
    train(model, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    restored = adamw(network())
    load_optimizer_state(restored, state)
    for tensor in state["state"][0].values():
        tensor.zero_()
    assert_same_state(optimizer, restored)


def test_options_return_but_how_the_update_is_executed_stays() -> None:
    saved = AdamW(network().parameters(), lr=0.5, betas=(0.5, 0.6), fused=True)
    live = AdamW(network().parameters(), lr=0.1, foreach=True)
    state = saved.state_dict()
    state["param_groups"][0]["initial_lr"] = 0.7
    load_optimizer_state(live, state)
    group = live.param_groups[0]
    assert (group["lr"], group["betas"], group["initial_lr"]) == (0.5, (0.5, 0.6), 0.7)
    assert (group["foreach"], group["fused"]) == (True, None)


def test_an_option_that_a_newer_release_added_keeps_its_default() -> None:
    state = adamw(network()).state_dict()
    del state["param_groups"][0]["amsgrad"]
    live = adamw(network())
    load_optimizer_state(live, state)
    assert live.param_groups[0]["amsgrad"] is True


def _drop_group(state: dict[str, Any]) -> None:
    state["param_groups"].pop()


def _drop_parameter(state: dict[str, Any]) -> None:
    state["param_groups"][1]["params"].pop()


def _stranger(state: dict[str, Any]) -> None:
    state["state"][99] = {"momentum_buffer": torch.ones(1)}


def _other_shape(state: dict[str, Any]) -> None:
    state["state"][0]["momentum_buffer"] = torch.ones(4, 3, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop_group, "checkpoint has 1 parameter groups, but the live optimizer has 2"),
        (_drop_parameter, "parameter group 1 has 1 parameters in the checkpoint, but 2 in the live"),
        (_stranger, "state for parameter 99, which is in none of its groups"),
        (_other_shape, r"'momentum_buffer' of parameter 0 has the shape \[4, 3, 3\] .* \[4, 3, 3, 3\]"),
        (lambda state: state.pop("state"), r"holds \['param_groups'\], expected 'state' and 'param_groups'"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(
    change: Callable[[dict[str, Any]], None], message: str
) -> None:
    model = network()
    optimizer = momentum(model)
    train(model, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["lr"] = 77.0
    change(state)
    before = copy.deepcopy(optimizer)
    with pytest.raises(CheckpointError, match=message):
        load_optimizer_state(optimizer, state)
    assert_same_state(optimizer, before)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_the_state_of_another_optimizer_is_refused_by_its_options() -> None:
    state = SGD(network().parameters(), lr=0.1).state_dict()
    with pytest.raises(CheckpointError, match=r"by another optimizer: it has dampening.*and lacks amsgrad"):
        load_optimizer_state(adamw(network()), state)
