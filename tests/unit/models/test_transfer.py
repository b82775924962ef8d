"""What is taken from other weights, what stays frozen, and that recomputing activations changes no gradient."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from paceline.checkpoint.weights import read_weights
from paceline.errors import CheckpointError, ModelError
from paceline.models.transfer import FreezeSchedule, adapt, freeze, load_fitting, trained_spans
from paceline.parsing.units import Duration
from paceline.recipe.model import ModelSection


def net(classes: int = 3) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, classes))


def test_what_fits_is_taken_and_the_rest_is_named() -> None:
    torch.manual_seed(0)
    source, target = net(5), net(3)
    own = target[3].weight.detach().clone()
    state = source.state_dict() | {"extra": torch.zeros(2)}
    said = load_fitting(target, state, source="old.safetensors")
    assert torch.equal(target[0].weight, source[0].weight)
    assert torch.equal(target[1].running_var, source[1].running_var)
    assert torch.equal(target[3].weight, own)
    assert "7 of 9 tensors come from old.safetensors; 3.weight, 3.bias are newly initialised" in said
    assert "3.weight, 3.bias, extra of the source are not used" in said
    with pytest.raises(ModelError, match="no parameter of x fits this network"):
        load_fitting(net(), {"body.weight": torch.zeros(3)}, source="x")


def trained(network: nn.Module) -> set[str]:
    return {name for name, each in network.named_parameters() if each.requires_grad}


@pytest.mark.parametrize(
    ("patterns", "left", "norm_learns"),
    [
        ((), {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"}, True),
        (("*", "!3.*"), {"3.weight", "3.bias"}, False),
        (("0.*",), {"1.weight", "1.bias", "3.weight", "3.bias"}, True),
        (("*.weight", "*.bias", "!*.bias"), {"0.bias", "1.bias", "3.bias"}, True),
    ],
)
def test_patterns_freeze_and_take_back(patterns: tuple[str, ...], left: set[str], norm_learns: bool) -> None:
    network = net()
    freeze(network, patterns)
    assert trained(network) == left
    assert network[1].training == norm_learns


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(4, affine=False),
        nn.SyncBatchNorm(4, affine=False),
        nn.InstanceNorm2d(4, track_running_stats=True),
        nn.BatchNorm2d(4, affine=False, momentum=None),
    ],
)
def test_a_norm_without_parameters_rests_with_the_part_it_is_in(norm: nn.Module) -> None:
    for patterns, learns in {("0.*",): True, ("*", "!2.*"): False, ("1.*",): False, ("*.weight",): True}.items():
        network = nn.Sequential(nn.Conv2d(1, 4, 3), copy.deepcopy(norm), nn.Conv2d(4, 2, 1))
        freeze(network, patterns)
        assert network[1].training == learns, patterns
    network, model = (
        nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.Conv2d(4, 2, 1)),
        ModelSection(
            frozen=("0.*", "1.*"), unfreeze={"1.*": Duration(2, "steps")}, freeze_after={"2.*": Duration(3, "steps")}
        ),
    )
    adapt(network, model)
    schedule = FreezeSchedule(network, *trained_spans(network, model, {"1.*": 2}, {"2.*": 3}), changed=lambda: None)
    seen = [(schedule.at(step), norm.training, network[2].weight.requires_grad) for step in range(4)]
    assert [each[1:] for each in seen] == [(False, True), (False, True), (True, True), (True, False)]
    network.requires_grad_(requires_grad=True)
    model = ModelSection(freeze_after={"0.*": Duration(1, "steps"), "1.*": Duration(1, "steps")})
    schedule = FreezeSchedule(network, *trained_spans(network, model, {}, {"0.*": 1, "1.*": 1}), changed=lambda: None)
    assert [(schedule.at(step), norm.training)[1] for step in range(2)] == [True, False]


class RunningScale(nn.Module):
    """A norm outside of torch's classes, as in timm, or a codebook's moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.scale = nn.Buffer(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.scale.lerp_(x.detach().square().mean(0), 0.1)
        return x * self.weight / self.scale


@pytest.mark.parametrize("kind", ["hook", "parametrization", "own"])
def test_buffers_of_frozen_parts_rest(kind: str) -> None:
    def normed() -> nn.Module:
        torch.manual_seed(0)
        layer = nn.Linear(6, 6)
        of = nn.utils.spectral_norm if kind == "hook" else nn.utils.parametrizations.spectral_norm
        return nn.Sequential(RunningScale() if kind == "own" else of(layer), nn.Linear(6, 2))

    def moves(network: nn.Module) -> bool:
        before = {name: each.clone() for name, each in network.named_buffers()}
        network(torch.randn(8, 6))
        return not all(torch.equal(each, before[name]) for name, each in network.named_buffers())

    body = () if kind == "own" else ("0.bias",)  # its bias is trained, and its frozen weight stays
    for patterns, learns in {("0.*",): False, ("*", *(f"!{each}" for each in body)): False, ("1.*",): True}.items():
        freeze(network := normed(), patterns)
        assert moves(network) == learns, patterns
    network, model = normed(), ModelSection(frozen=("0.*",), unfreeze={"0.*": Duration(2, "steps")})
    adapt(network, model)
    schedule = FreezeSchedule(network, *trained_spans(network, model, {"0.*": 2}, {}), changed=lambda: None)
    assert [(schedule.at(step), moves(network))[1] for step in range(3)] == [False, False, True]


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ModelError, match=r"no parameter's name matches '!fc.\*'.*3\.weight, 3\.bias"):
        freeze(net(), ("*", "!fc.*"))


def test_a_run_begins_from_weights_for_other_classes(train_tiny: Any, tiny_task: Any, tmp_path: Path) -> None:
    first = train_tiny("first", {"train.ema": "off"})
    weights = tmp_path / "first.safetensors"
    save_file(read_weights(first.run_dir).state, weights)  # a file of someone else's: without a word about itself
    asked = {"model.initialize_from": str(weights), "train.ema": "off", "optimizer.lr": 1e-30}
    with pytest.raises(CheckpointError, match="load only what fits"):
        train_tiny("strict", asked, task=tiny_task(classes=2))
    second = train_tiny("second", {**asked, "model.initialize_partly": True}, task=tiny_task(classes=2))
    old, new = read_weights(first.run_dir).state, read_weights(second.run_dir).state
    for name, tensor in new.items():
        if tensor.is_floating_point() and "running" not in name:
            assert (tensor.shape == old[name].shape and torch.equal(tensor, old[name])) != name.startswith("classifier")
