"""What is read off a network that is never computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.errors import DataError
from paceline.recipe.load import load_recipe
from paceline.recipe.running import Parallel
from paceline_advisor.scaling.network import describe


def _small(*overrides: str) -> tuple[str, ...]:
    return ("model.options={width: 4, stages: 1}", *overrides)


def test_every_gradient_is_there_once_and_the_last_layer_comes_first() -> None:
    recipe = load_recipe("digits", _small()).recipe
    found = describe(recipe)
    from paceline.tasks.task import build_task

    sizes = [each.numel() * 4 for each in build_task(recipe).build_model().parameters()]
    assert sorted(each.size_bytes for each in found.network.gradients) == sorted(sizes)
    ready = [each.ready for each in found.network.gradients]
    assert ready == sorted(ready)
    assert ready[-1] == pytest.approx(1)
    # The classifier's bias or weight: 10 classes.
    assert found.network.gradients[0].size_bytes in (4 * 10, sizes[-2])
    assert found.samples == 1438


def test_the_order_is_that_in_which_autograd_produces_them() -> None:
    recipe = load_recipe("digits", _small()).recipe
    from paceline.tasks.task import build_task

    network = build_task(recipe).build_model()
    arrived: list[int] = []
    for each in network.parameters():
        each.register_hook(lambda gradient: arrived.append(gradient.numel() * 4))
    network(torch.randn(4, 1, 8, 8)).sum().backward()
    predicted = [each.size_bytes for each in describe(recipe).network.gradients]
    # Weight and bias of a layer may come in either order: compare where each layer's bytes have arrived.
    assert _running_maximum(arrived) == _running_maximum(predicted)


def _running_maximum(sizes: list[float] | list[int]) -> list[float]:
    total, found = 0.0, []
    for size in sizes:
        total += size
        found.append(total)
    return [found[index] for index in range(2, len(found), 3)]


def test_flops_of_a_step() -> None:
    found = describe(load_recipe("resnet50").recipe)
    # 4.09 GMAC for an image of 224 pixels (torchvision's weights: 4.09 GFLOPS of ResNet-50), three times but for the
    # images' own gradient, 118 million.
    assert found.flops_per_sample == pytest.approx(2 * (3 * 4.089e9 - 118e6), rel=0.001)
    assert found.numbers.trained == 25_557_032
    assert len(found.network.gradients) == 161
    assert found.decodes
    assumed = "as for ImageNet, 1,000 classes and images of 224 pixels are assumed"
    assert found.notices == (f"data.path is not set: {assumed}; 1,281,167 samples are an epoch",)
    assert found.samples == 1_281_167


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param("dlrm-criteo", "Criteo's Kaggle", marks=pytest.mark.thorough),
        ("gpt-124m", "tokens are assumed"),
    ],
)
def test_other_tasks_are_not_taken_for_image_classification_without_their_data(name: str, message: str) -> None:
    found = describe(load_recipe(name).recipe)
    assert message in found.notices[0]
    assert found.numbers.trained > 10**8


def test_a_task_whose_data_are_not_here_says_so() -> None:
    with pytest.raises(DataError, match="nowhere"):
        describe(load_recipe("retinanet_resnet50_fpn_coco", ("data.path=nowhere",)).recipe)


def test_fsdp_gathers_every_weight_once_in_the_order_of_the_network() -> None:
    found = describe(load_recipe("resnet50").recipe)
    assert sum(each.weight_bytes for each in found.network.units) == 25_557_032 * 4
    assert sum(each.share for each in found.network.units) == pytest.approx(1)
    assert len(found.network.units) > 10


def test_compression_halves_what_is_sent() -> None:
    recipe = load_recipe("digits", _small()).recipe
    halved = replace(recipe, parallel=Parallel(gradient_compression="bf16"))
    sums = [
        sum(each.size_bytes for each in describe(each_recipe).network.gradients) for each_recipe in (recipe, halved)
    ]
    assert sums[0] == 2 * sums[1]


def test_frozen_parameters_are_not_sent() -> None:
    recipe = load_recipe("digits", _small("model.frozen=[stem*]")).recipe
    assert len(describe(recipe).network.gradients) < len(
        describe(load_recipe("digits", _small()).recipe).network.gradients
    )


def test_damaged_data_are_not_taken_for_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        describe(load_recipe("resnet50", (f"data.path={tmp_path}",)).recipe)


class Odd(nn.Module):
    """It cannot be called without numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if inputs.sum().item() > 0:
            return self.inner(inputs.flatten(1))
        return self.inner(-inputs.flatten(1))


def odd(**_: object) -> nn.Module:
    return Odd()


def test_a_network_that_cannot_be_called_is_weighed_by_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "odd_network", sys.modules[__name__])
    recipe = load_recipe("digits", ("model.name=odd_network:odd", "model.options=null")).recipe
    found = describe(recipe)
    assert found.flops_per_sample is None
    assert any("weighted by their parameters" in each for each in found.notices)
    assert sum(each.size_bytes for each in found.network.gradients) == (64 * 10 + 10) * 4


class Uneven(nn.Module):
    """Two modules whose arithmetic is not that of their outputs and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(8))
        self.up = nn.ConvTranspose2d(1, 8, 4, 2, 1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        words = self.up(inputs).flatten(2).transpose(1, 2) + self.place
        return self.head(self.attention(words, words, words, need_weights=False)[0].mean(1))


def uneven(**_: object) -> nn.Module:
    return Uneven()


def test_layers_are_weighed_by_what_their_backward_pass_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from torch.utils.flop_counter import FlopCounterMode

    monkeypatch.setitem(sys.modules, "uneven_network", sys.modules[__name__])
    found = describe(load_recipe("digits", ("model.name=uneven_network:uneven", "model.options=null")).recipe)
    with torch.device("meta"):
        network, images = Uneven(), torch.zeros(2, 1, 8, 8)
    with FlopCounterMode(display=False) as forward:
        out = network(images)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    theirs = forward.get_total_flops() + backward.get_total_flops()
    assert found.flops_per_sample == theirs / 2

    numbers = [each.size_bytes / 4 for each in found.network.gradients]
    ready = dict(zip(numbers, (each.ready for each in found.network.gradients), strict=True))
    # The head first, then attention with the projection that it does not call, then the rest.
    assert sorted(numbers[:2]) == [10, 80]
    assert [set(numbers[2:4]), set(numbers[4:6])] == [{64, 8}, {192, 24}]
    assert ready[80] < 0.01
    # Attention's share, by torch's counter: all but the head's and the transposed convolution's one product.
    up = 2 * 2 * 8 * 8 * 8 * 16
    assert ready[192] == pytest.approx(1 - up / backward.get_total_flops(), abs=0.005)
    assert ready[128] == 1
