"""The small residual net fits every image size, its options do what they say; the lecture's is the lecture's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.errors import ModelError
from paceline.models.build import parameter_count
from paceline.models.lecture_net import lecture_net
from paceline.models.small_resnet import ResidualBlock, small_resnet


def modules_of(model: nn.Module, kind: type[nn.Module]) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, kind)]


@pytest.mark.parametrize("in_channels", [1, 3])
@pytest.mark.parametrize("side", [8, 9, 16, 28, 32])
def test_it_takes_every_image_size_and_batchnorm_never_sees_a_single_pixel(side: int, in_channels: int) -> None:
    model = small_resnet(10, in_channels, width=4, stages=4)
    sides: list[int] = []
    for norm in modules_of(model, nn.BatchNorm2d):
        norm.register_forward_pre_hook(lambda _, inputs: sides.append(min(inputs[0].shape[-2:])))
    logits = model(torch.randn(1, in_channels, side, side))
    assert (logits.shape, bool(logits.isfinite().all())) == ((1, 10), True)
    assert min(sides) >= 2


def test_stages_halve_the_image_and_double_the_width() -> None:
    model = small_resnet(10, width=4)
    shapes: list[tuple[int, ...]] = []
    for stage in model.stages:
        stage.register_forward_hook(lambda *call: shapes.append(tuple(call[-1].shape)))
    model(torch.randn(2, 3, 32, 32))
    assert shapes == [(2, 8, 16, 16), (2, 16, 8, 8), (2, 32, 4, 4)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_classes": 10, "in_channels": 1, "width": 16, "stages": 2}, 116_602),
        ({"num_classes": 10}, 486_938),
        ({"num_classes": 100, "depth": 2}, 886_516),
    ],
)
def test_parameter_count(options: dict[str, int], expected: int) -> None:
    assert parameter_count(small_resnet(**options)) == expected


def test_blocks_start_as_the_identity() -> None:
    blocks = modules_of(small_resnet(10, depth=2), ResidualBlock)
    assert len(blocks) == 6
    for block in blocks:
        features = torch.rand(2, block.first.conv.in_channels, 8, 8)
        torch.testing.assert_close(block(features), features, rtol=0, atol=0)


@pytest.mark.parametrize(("option", "value"), [("width", 0), ("stages", 0), ("depth", -1), ("dropout", 1.0)])
def test_an_option_out_of_range_is_named(option: str, value: float) -> None:
    with pytest.raises(ModelError, match=f"model.options.{option}={value}: .* needs {option}"):
        small_resnet(10, **{option: value})


def test_the_lecture_s_network_has_the_parameters_that_it_prints() -> None:
    network = lecture_net(10)
    assert parameter_count(network) == 120_078
    # "(post net.to) GPU max_memory_allocated: 0.481792 MB": torch's allocator rounds each tensor up to 512 bytes.
    assert sum(-(-each.numel() * 4 // 512) * 512 for each in network.parameters()) / 1e6 == 0.481792
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_the_lecture_s_network_with_six_channels_is_the_tutorials() -> None:
    assert parameter_count(lecture_net(10, channels=6)) == 62_006
    with pytest.raises(ModelError, match="channels"):
        lecture_net(10, channels=0)
