"""Does a snapshot stand still, and is a state that does not fit refused before anything is changed?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.checkpoint.components import OptimizerComponent, Registry
from paceline.checkpoint.store import CheckpointStore, read_components
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
    return read_components(CheckpointStore(directory).save(1, registry.snapshot(), {}).path)


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
        (
            network(4, torch.bfloat16),
            r"'0\.weight' is bfloat16 \[4, 3\] .* float32 \[4, 3\]",
        ),
        (nn.Sequential(nn.Linear(3, 4)), r"'1\.weight' is absent in the checkpoint, .* float32 \[4\]"),
        (nn.Sequential(*network(), nn.Linear(4, 1)), r"'2\.weight' is float32 \[1, 4\] .* object has absent"),
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
    with pytest.raises(CheckpointError, match=r"registered twice|cannot name a component"):
        registry_of(model=Counter()).add(name, Counter())
