"""Networks that are planned, or spread over processes, without being built whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.host.world import World
from paceline.models.speed_net import Whitening
from paceline.recipe.load import load_recipe
from paceline.tasks.image_classification import ImageClassification
from paceline.trainer.subject import Subject
from paceline.trainer.train import plan_only

TINY = {
    "model.options": {"depth": 1, "width": 16, "heads": 2},
    "data.text.context": 16,
    "parallel.device": "cpu",
    "optimizer.name": "adamw",
    "train.precision": "fp32",
}


def prepared(world_size: int, **overrides: Any) -> Any:
    loaded = load_recipe("gpt-small-docs", TINY | overrides)
    world = World(rank=0, world_size=world_size, local_rank=0, local_world_size=world_size)
    return Subject.open(loaded.recipe, world, "network")


def test_a_process_that_will_hold_a_part_builds_no_numbers() -> None:
    spread = prepared(2, **{"parallel.strategy": "fsdp"})
    assert all(each.is_meta for each in spread.network.parameters())
    whole = prepared(2, **{"parallel.strategy": "ddp"})
    assert whole.first_values is None
    for name, each in whole.network.state_dict().items():
        assert torch.equal(spread.first_values(name), each)


def test_one_that_cannot_is_built_whole_and_says_so(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    first = prepared(1).network.state_dict()
    # As the library of Transformers writes it: of a parameter with two names, one.
    save_file({name: each for name, each in first.items() if name != "head.weight"}, tmp_path / "model.safetensors")
    begun = prepared(2, **{"parallel.strategy": "fsdp", "model.initialize_from": str(tmp_path / "model.safetensors")})
    assert begun.first_values is None
    assert any("every process built the whole network" in each for each in begun.notices)
    assert all(torch.equal(each, first[name]) for name, each in begun.network.state_dict().items())


@pytest.mark.parametrize(("name", "strategy"), [("gpt-124m", "ddp"), ("gpt-7b", "fsdp")])
def test_gpt_s_sizes_are_planned_without_text(name: str, strategy: str) -> None:
    plan = plan_only(load_recipe(name, {"parallel.strategy": strategy}), world_size=8)
    assert plan.strategy == strategy
    assert plan.parameters == {"gpt-124m": 124_439_808, "gpt-7b": 6_658_404_352}[name]
    assert "50,257 different tokens are assumed" in plan.reasons["data.path"]


class Whitened(ImageClassification):
    """Digits, whose network begins from them: without BatchNorm, so that it could be spread."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(Whitening(1, 2), nn.Flatten(), nn.Linear(8 * 7 * 7, 10))


def test_first_weights_that_are_made_of_the_data_are_made_also_where_they_are_spread() -> None:
    found = {}
    for strategy in ("ddp", "fsdp"):
        recipe = load_recipe("digits", {"parallel.device": "cpu", "parallel.strategy": strategy}).recipe
        world = World(rank=0, world_size=2, local_rank=0, local_world_size=2)
        found[strategy] = Subject.open(recipe, world, "network", task=Whitened(recipe))
    assert found["fsdp"].first_values is None
    assert any("computed from the training data" in each for each in found["fsdp"].notices)
    filters = found["fsdp"].network.state_dict()["0.weight"]
    assert torch.equal(filters[4:], -filters[:4])
    assert torch.equal(filters, found["ddp"].network.state_dict()["0.weight"])


class WithFirstWeights(Whitened):
    """One that is documented to be enough: no word of whether it does anything."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def first_weights(self, network: nn.Module) -> None:
        nn.init.ones_(network.get_parameter("1.weight"))


def test_so_are_those_of_a_task_of_one_s_own() -> None:
    recipe = load_recipe("digits", {"parallel.device": "cpu", "parallel.strategy": "fsdp"}).recipe
    world = World(rank=0, world_size=2, local_rank=0, local_world_size=2)
    begun = Subject.open(recipe, world, "network", task=WithFirstWeights(recipe))
    assert torch.equal(begun.network.state_dict()["1.weight"], torch.ones(10, 64))
