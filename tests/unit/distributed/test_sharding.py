"""What is gathered together, and which networks cannot be spread."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from paceline.distributed.sharding import check_sharded, modules_to_shard, sharding_options
from paceline.errors import ModelError
from paceline.models.small_resnet import small_resnet
from paceline.recipe.running import Parallel


def parallel(**changes: Any) -> Parallel:
    return dataclasses.replace(Parallel(strategy="fsdp"), **changes)


def test_blocks_of_a_residual_net() -> None:
    assert list(modules_to_shard(small_resnet(10, stages=2, depth=2), parallel())) == [
        *("stages.1.refine.1", "stages.1.refine.0", "stages.1"),
        *("stages.0.refine.1", "stages.0.refine.0", "stages.0"),
    ]


def test_layers_of_a_transformer() -> None:
    network = pytest.importorskip("timm").create_model("vit_tiny_patch16_224", depth=3)
    assert list(modules_to_shard(network, parallel())) == ["blocks.2", "blocks.1", "blocks.0"]


def test_a_network_without_blocks_is_gathered_as_one() -> None:
    assert modules_to_shard(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), parallel()) == {}


def test_modules_by_pattern() -> None:
    network = small_resnet(10, stages=2)
    assert list(modules_to_shard(network, parallel(shard_modules=("stages.?", "classifier")))) == [
        *("classifier", "stages.1", "stages.0")
    ]
    for pattern in ("layers.*", "stages.0.refine.0.pool"):
        with pytest.raises(ModelError, match=r"parallel\.shard_modules: no module that is called and has parameters"):
            check_sharded(network, parallel(shard_modules=(pattern,)))


def test_lists_of_modules_are_not_called() -> None:
    network = nn.ModuleList([nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]), nn.Sequential(nn.Linear(2, 2)))])
    assert list(modules_to_shard(network, parallel())) == ["0.1", "0"]


def test_modules_that_share_a_parameter_gather_together() -> None:
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.ReLU()) for _ in range(2)))
    network = nn.Sequential(blocks, nn.Linear(3, 3))
    check_sharded(network, parallel())
    blocks[1][0].weight = blocks[0][0].weight
    with pytest.raises(
        ModelError, match=r"0\.0\.0\.weight is used by 0\.0 and 0\.1, which gather their weights separately"
    ):
        check_sharded(network, parallel())
    check_sharded(network, parallel(shard_modules=("0",)))


def test_networks_that_cannot_be_spread() -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.scale = nn.Parameter(torch.ones(()))

    with pytest.raises(ModelError, match="cannot shard scale, which is a single number"):
        check_sharded(Scaled(), parallel())
    with pytest.raises(ModelError, match=r"the network has torch.float32 and torch.float64"):
        check_sharded(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double()), parallel())
    with pytest.raises(ModelError, match=r"gather_dtype=bf16: the network has BatchNorm \(stem.norm"):
        check_sharded(small_resnet(10), parallel(gather_dtype="bf16"))
    check_sharded(small_resnet(10), parallel())


@pytest.mark.parametrize(
    ("changes", "gathered", "added"),
    [
        ({}, None, None),
        ({"gather_dtype": "bf16"}, torch.bfloat16, torch.float32),
        ({"gradient_compression": "bf16"}, None, torch.bfloat16),
        ({"gather_dtype": "bf16", "gradient_compression": "fp16"}, torch.bfloat16, torch.float16),
    ],
)
def test_gradients_are_added_up_in_fp32_unless_asked(
    changes: dict[str, Any], gathered: torch.dtype | None, added: torch.dtype | None
) -> None:
    policy = sharding_options(parallel(**changes), mesh=None)["mp_policy"]
    assert (policy.param_dtype, policy.reduce_dtype) == (gathered, added)
