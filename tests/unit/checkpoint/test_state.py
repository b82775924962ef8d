"""Snapshots stand still, optimizers resume exactly, and a state that does not fit changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from paceline.checkpoint.manifest import read_components
from paceline.checkpoint.state import HostCopies, OptimizerComponent, Registry, load_optimizer_state
from paceline.checkpoint.store import CheckpointStore
from paceline.errors import CheckpointError


class Counter:
    """A component without tensors."""

    def __init__(self, step: int = 0) -> None:
        self.step = step

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def network(width: int = 4, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width)).to(dtype)


def registry_of(**components: Any) -> Registry:
    registry = Registry()
    for name, component in components.items():
        registry.add(name, component)
    return registry


def through_disk(registry: Registry, directory: Path) -> dict[str, dict[str, Any]]:
    return read_components(CheckpointStore(directory).save(1, registry.snapshot(), {}))


def test_everything_returns_through_a_checkpoint(tmp_path: Path) -> None:
    model, counter = network(), Counter(7)
    states = through_disk(registry_of(model=model, counter=counter), tmp_path)
    other, empty = network(), Counter()
    registry = registry_of(model=other, counter=empty)
    registry.restore(states)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in other.state_dict().items())
    assert empty.step == 7
    assert list(registry.snapshot()) == ["model", "counter"]


def test_a_snapshot_does_not_follow_the_live_objects() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model(torch.randn(8, 3)).sum().backward()
    model.load_state_dict(before)
    optimizer.step()
    momentum = optimizer.state_dict()["state"][0]["momentum_buffer"].clone()
    model.load_state_dict(before)
    snapshot = registry_of(model=model, optimizer=OptimizerComponent(optimizer)).snapshot()
    with torch.no_grad():
        for tensor in (*model.state_dict().values(), optimizer.state_dict()["state"][0]["momentum_buffer"]):
            tensor.zero_()
        optimizer.param_groups[0]["lr"] = 5.0
    assert all(torch.equal(snapshot["model"][key], value) for key, value in before.items())
    assert torch.equal(snapshot["optimizer"]["state"][0]["momentum_buffer"], momentum)
    assert snapshot["optimizer"]["param_groups"][0]["lr"] == 0.1
    assert all(not tensor.requires_grad for tensor in snapshot["model"].values())


def test_missing_and_extra_components_are_named_and_nothing_changes() -> None:
    states = registry_of(model=network(), ema=network(), counter=Counter(7)).snapshot()
    counter = Counter()
    registry = registry_of(model=network(), counter=counter, scaler=Counter())
    with pytest.raises(CheckpointError, match=r"it lacks 'scaler'.*it holds 'ema', which"):
        registry.restore(states)
    with pytest.raises(CheckpointError, match=r"it lacks 'scaler'\. Use"):
        registry.restore({name: states[name] for name in ("model", "counter")})
    with pytest.raises(CheckpointError, match=r"this run: it holds 'ema', which"):
        registry.restore({**states, "scaler": {"step": 1}})
    assert counter.step == 0
    renamed = registry_of(counter=Counter(), modle=network())
    with pytest.raises(CheckpointError, match=r"it lacks 'modle'\. Did you mean 'model'\?"):
        renamed.restore({"counter": {"step": 1}, "model": {}})


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (network(5), r"'0\.weight' is float32 \[5, 3\] .* float32 \[4, 3\]"),
        (network(4, torch.bfloat16), r"'0\.weight' is bfloat16 \[4, 3\] .* float32 \[4, 3\]"),
        (nn.Sequential(nn.Linear(3, 4)), r"'1\.weight' is absent in the checkpoint, .* float32 \[4\]"),
        (
            nn.Sequential(*network(), nn.Linear(4, 1)),
            r"'2\.weight' is float32 \[1, 4\] .* but absent in the live object",
        ),
    ],
)
def test_another_model_is_refused_by_key_before_anything_changes(saved: nn.Module, message: str) -> None:
    counter = Counter()
    registry = registry_of(counter=counter, model=network())
    with pytest.raises(CheckpointError, match=f"component 'model': {message}"):
        registry.restore({"counter": {"step": 7}, "model": saved.state_dict()})
    assert counter.step == 0


def test_a_component_that_fails_on_its_own_state_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"component 'counter' does not accept .*KeyError\('step'\)"):
        registry_of(counter=Counter()).restore({"counter": {}})


class Picky(Counter):
    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["step"] < 0:
            raise CheckpointError("the step is negative")


def test_a_component_that_checks_itself_is_asked_before_anything_changes() -> None:
    first, picky = Counter(), Picky()
    registry = registry_of(first=first, picky=picky)
    with pytest.raises(CheckpointError, match="the step is negative"):
        registry.restore({"first": {"step": 3}, "picky": {"step": -1}})
    assert first.step == 0
    with pytest.raises(CheckpointError, match=r"component 'picky' does not accept"):
        registry.restore({"first": {"step": 3}, "picky": {"step": None}})
    registry.restore({"first": {"step": 3}, "picky": {"step": 4}})
    assert (first.step, picky.step) == (3, 4)


def test_tied_weights_return_tied(tmp_path: Path) -> None:
    def tied() -> nn.ModuleDict:
        model = nn.ModuleDict({"embedding": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
        model["head"].weight = model["embedding"].weight
        return model

    saved, live = tied(), tied()
    registry_of(model=live).restore(through_disk(registry_of(model=saved), tmp_path))
    assert live["head"].weight is live["embedding"].weight
    assert torch.equal(live["head"].weight, saved["embedding"].weight)


@pytest.mark.parametrize("name", ["model", "manifest", "../x", ""])
def test_a_taken_or_impossible_name_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"registered twice|is not a valid component name"):
        registry_of(model=Counter()).add(name, Counter())


def snapshot(copies: HostCopies, state: dict[str, Any]) -> dict[str, Any]:
    taken = copies.take("model", state)
    copies.finish()
    return taken


TENSORS = {
    "plain": torch.randn(3, 4),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.randn(3, 4).t(),
    "every second": torch.randn(8)[::2],
    "broadcast": torch.randn(1, 4).expand(3, 4),
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 3),
    "bf16": torch.randn(5).to(torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "one of many strides": torch.randn(6)[2:3].as_strided((1, 1), (5, 7)),
}


@pytest.mark.parametrize("name", TENSORS)
def test_values_and_layout_are_kept_and_nothing_is_shared(name: str) -> None:
    live = TENSORS[name].clone(memory_format=torch.preserve_format) if name != "broadcast" else TENSORS[name]
    taken = snapshot(HostCopies(), {"a": live})["a"]
    assert taken.dtype == live.dtype
    assert torch.equal(taken, live)
    if name == "channels last":
        assert taken.stride() == live.stride()
    if live.numel() and name != "broadcast":
        live.fill_(7)
        assert not torch.equal(taken, live)


def test_the_same_memory_is_used_again_while_shapes_stay() -> None:
    copies, state = HostCopies(), {"a": torch.zeros(4), "b": [torch.ones(2, 2)]}
    first = snapshot(copies, state)
    state["a"] += 1
    second = snapshot(copies, state)
    assert first["a"].data_ptr() == second["a"].data_ptr()
    assert torch.equal(second["a"], torch.ones(4))
    third = snapshot(copies, {"a": torch.zeros(5), "b": state["b"]})
    assert third["a"].shape == (5,)
    assert third["b"][0].data_ptr() == second["b"][0].data_ptr()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_tensors_that_no_file_holds_are_left_to_be_refused_by_name() -> None:
    copies = HostCopies()
    state = {"sparse": torch.eye(3).to_sparse_csr(), "conjugate": torch.tensor([1 + 2j]).conj()}
    taken = copies.take("state", {**state, "meta": torch.empty(3, device="meta")})
    copies.finish()
    assert taken["sparse"].layout == torch.sparse_csr
    assert taken["meta"].is_meta
    assert taken["conjugate"].tolist() == [1 - 2j]
    assert not taken["conjugate"].is_conj()


def test_a_parameter_leaves_its_gradient_behind() -> None:
    assert not snapshot(HostCopies(), {"a": torch.nn.Parameter(torch.ones(2))})["a"].requires_grad


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


def convolutions(dtype: torch.dtype = torch.float32) -> nn.Module:
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
    saved = CheckpointStore(directory).save(1, {"optimizer": optimizer.state_dict()}, {})
    return read_components(saved)["optimizer"]


@pytest.mark.parametrize("build", [momentum, adamw, adamw_tensor_lr])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_optimizer_makes_the_same_steps(tmp_path: Path, build: Build, dtype: torch.dtype) -> None:
    model = convolutions(dtype)
    optimizer = build(model)
    train(model, optimizer, range(3))
    resumed = convolutions(dtype)
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
    model = convolutions(torch.bfloat16)
    optimizer = adamw(model)
    train(model, optimizer, range(1))
    for state in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = torch.rand(state[key].shape, dtype=torch.float64).to(dtype)
    restored = adamw(convolutions(torch.bfloat16))
    load_optimizer_state(restored, saved_state(optimizer, tmp_path))
    assert_same_state(optimizer, restored)


def test_moments_take_the_memory_format_of_their_parameter(tmp_path: Path) -> None:
    model = convolutions()
    optimizer = adamw(model)
    train(model, optimizer, range(1))
    fresh = convolutions()
    restored = adamw(fresh)
    load_optimizer_state(restored, saved_state(optimizer, tmp_path))
    weight = next(fresh.parameters())
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert restored.state[weight]["exp_avg"].stride() == weight.stride()


def test_the_restored_state_shares_no_memory_with_the_saved_one() -> None:
    model = convolutions()
    optimizer = adamw(model)
    train(model, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    restored = adamw(convolutions())
    load_optimizer_state(restored, state)
    for tensor in state["state"][0].values():
        tensor.zero_()
    assert_same_state(optimizer, restored)


@pytest.mark.parametrize("fused", [True, None])
def test_options_return_but_how_the_update_is_executed_stays(fused: bool | None) -> None:
    saved = AdamW(convolutions().parameters(), lr=0.5, betas=(0.5, 0.6), fused=fused)
    live = AdamW(convolutions().parameters(), lr=0.1, foreach=True)
    state = saved.state_dict()
    state["param_groups"][0]["initial_lr"] = 0.7
    load_optimizer_state(live, state)
    group = live.param_groups[0]
    assert (group["lr"], group["betas"], group["initial_lr"]) == (0.5, (0.5, 0.6), 0.7)
    assert (group["foreach"], group["fused"]) == (True, None)
    # On a CPU, fused updates round differently: a run begun without them resumes without them.
    fused_live = AdamW(convolutions().parameters(), fused=True)
    load_optimizer_state(fused_live, state)
    assert fused_live.param_groups[0]["fused"] is fused


def test_an_option_that_a_newer_release_added_keeps_its_default() -> None:
    state = adamw(convolutions()).state_dict()
    del state["param_groups"][0]["amsgrad"]
    live = adamw(convolutions())
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
    model = convolutions()
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
    state = SGD(convolutions().parameters(), lr=0.1).state_dict()
    with pytest.raises(CheckpointError, match=r"by another optimizer: it has dampening.*and lacks amsgrad"):
        load_optimizer_state(adamw(convolutions()), state)
