"""Is the work of a step counted right: by hand, against torch's counter and against published figures?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from paceline.models.flops import SUM_OF_GRADIENTS, Product, StepWork, Work, WorkCounter


def count(network: nn.Module, inputs: Tensor, *, train: bool = True) -> StepWork:
    with WorkCounter(network) as counter:
        out = network(inputs)
        if train:
            out.float().square().mean().backward()
    return counter.work


def flops_of(found: StepWork, layer: str) -> dict[str, int]:
    return {
        phase: sum(each.flops for each in works) for (name, phase), works in found.by_layer().items() if name == layer
    }


def product_of(found: StepWork, layer: str, phase: str) -> Work:
    return next(each for each in found.works if (each.layer, each.phase) == (layer, phase) and each.product)


def test_a_linear_layer_by_hand() -> None:
    found = count(nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5)), torch.randn(8, 20))
    once = 2 * 8 * 20 * 30
    assert flops_of(found, "0") == {"forward": once, "wgrad": once}  # nobody asks for the input's gradient
    once = 2 * 8 * 30 * 5
    assert flops_of(found, "2") == {"forward": once, "dgrad": once, "wgrad": once}
    forward = product_of(found, "0", "forward")
    assert forward.product == Product(8, 30, 20)
    assert (forward.bytes_read, forward.bytes_written) == (4 * (8 * 20 + 20 * 30 + 30), 4 * 8 * 30)
    assert forward.intensity == pytest.approx(2 * 8 * 20 * 30 / (4 * (8 * 20 + 20 * 30 + 30 + 8 * 30)))
    (relu,) = (each for each in found.works if (each.layer, each.phase) == ("1", "forward"))
    assert (relu.operator, relu.flops, relu.bytes_read, relu.bytes_written) == ("relu", 0, 4 * 240, 4 * 240)
    assert found.uncounted == ()


def test_weights_and_inputs_gradients_are_told_apart_under_autocast() -> None:
    network = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 48))
    with torch.autocast("cpu", torch.bfloat16):
        found = count(network, torch.randn(4, 16))
    assert product_of(found, "1", "dgrad").product == Product(4, 32, 48)
    assert product_of(found, "1", "wgrad").product in (Product(48, 32, 4), Product(32, 48, 4))
    assert product_of(found, "1", "forward").dtype == "bfloat16"


@pytest.mark.parametrize(("groups", "stride"), [(1, 1), (1, 2), (4, 1), (8, 2)])
def test_a_convolution_by_hand(groups: int, stride: int) -> None:
    layer = nn.Conv2d(8, 16, 3, stride, padding=1, groups=groups, bias=False)
    found = count(nn.Sequential(nn.Conv2d(3, 8, 1), layer), torch.randn(2, 3, 10, 10))
    pixels = 2 * (10 // stride) ** 2
    once = 2 * pixels * 16 * (8 // groups) * 9
    assert flops_of(found, "1") == {"forward": once, "dgrad": once, "wgrad": once}
    forward = product_of(found, "1", "forward")
    assert forward.product == Product(pixels, 16 // groups, 8 // groups * 9, groups, "convolution", 9)
    for phase, sizes in (
        ("dgrad", (200, 8 // groups, 16 // groups * 9)),
        ("wgrad", (8 // groups * 9, 16 // groups, pixels)),
    ):
        assert product_of(found, "1", phase).product == Product(*sizes, groups, "convolution", 9)
    weights = 16 * (8 // groups) * 9
    assert forward.bytes_read == 4 * (2 * 8 * 100 + weights)
    assert forward.bytes_written == 4 * pixels * 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 24)

    def forward(self, inputs: Tensor) -> Tensor:
        heads = self.first(inputs).unflatten(-1, (3, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads)


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
def test_attention_by_hand(backend: SDPBackend) -> None:
    with sdpa_kernel(backend):
        found = count(Attention(), torch.randn(2, 10, 24))
    scores = 2 * 2 * 3 * 10 * 10 * 8
    own = flops_of(found, "")
    assert own["forward"] == 2 * scores
    assert own["dgrad"] == 4 * scores
    assert "wgrad" not in own
    assert found.flops("recompute") == (scores if backend is SDPBackend.FLASH_ATTENTION else 0)
    assert found.model_flops == 6 * scores + 2 * 2 * 2 * 10 * 24 * 24


def test_what_is_computed_again_counts_once() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.inner = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

        def forward(self, inputs: Tensor) -> Tensor:
            return checkpoint(self.inner, self.stem(inputs), use_reentrant=False)

    found = count(Block(), torch.randn(4, 8))
    once = 2 * 4 * 8 * 8
    assert found.flops("forward") == 3 * once
    assert found.flops("dgrad") == 2 * once
    assert found.flops("wgrad") == 3 * once
    assert 0 < found.flops("recompute") <= 2 * once
    assert found.model_flops == 8 * once
    assert flops_of(found, "inner.2")["dgrad"] == once


def test_loss_and_optimizer_have_phases_of_their_own() -> None:
    network = nn.Sequential(nn.Linear(6, 3))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, foreach=True)
    with WorkCounter(network) as counter:
        F.cross_entropy(network(torch.randn(5, 6)), torch.zeros(5, dtype=torch.long)).backward()
        with counter.phase("optimizer"):
            optimizer.step()
    phases = {phase for _, phase in counter.work.by_layer()}
    assert phases == {"forward", "wgrad", "loss", "optimizer"}
    moved = sum(each.bytes_moved for each in counter.work.works if each.phase == "optimizer")
    assert moved >= 4 * (6 * 3 + 3) * 3  # reads gradients and weights, writes weights


def test_an_operator_that_is_not_known_is_named() -> None:
    class Odd(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return torch.linalg.inv(inputs) @ inputs

    found = count(Odd(), torch.eye(4) + torch.rand(4, 4) / 9, train=False)
    assert [each.operator for each in found.uncounted] == ["linalg_inv_ex"]
    assert 0 < found.uncounted[0].share < 1
    assert found.uncounted[0].calls == 1


def test_watching_changes_nothing() -> None:
    def step(watched: bool) -> tuple[list[Tensor], Tensor]:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.3), nn.Flatten(), nn.Linear(144, 2))
        inputs = torch.randn(2, 3, 8, 8)
        if watched:
            count(network, inputs)
        else:
            network(inputs).float().square().mean().backward()
        assert not any(each._forward_hooks or each._forward_pre_hooks for each in network.modules())
        return [each.grad for each in network.parameters()], torch.get_rng_state()

    (ours, state), (plain, untouched) = step(True), step(False)
    assert all(map(torch.equal, ours, plain))
    assert torch.equal(state, untouched)


class Whole(nn.Module):
    """A module that takes its input several times, or answers with several tensors."""

    def __init__(self, inner: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.inner, self.times = inner, times

    def forward(self, inputs: Tensor) -> Tensor:
        out = self.inner(*[inputs] * self.times)
        return out[0] if isinstance(out, tuple) else out


class Products(nn.Module):
    """Batched products without weights."""

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.baddbmm(inputs @ inputs.mT, inputs, inputs.mT).bmm(inputs)


# What is called, and the shape of its input.
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolution": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), (2, 4, 9, 9)),
    "one dimension": (lambda: nn.Conv1d(4, 6, 3, dilation=2), (2, 4, 11)),
    "three dimensions": (lambda: nn.Conv3d(4, 6, 3), (2, 4, 5, 5, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, 2, output_padding=1), (2, 4, 5, 5)),
    "grouped": (lambda: nn.Conv2d(4, 8, 3, groups=2), (2, 4, 8, 8)),
    "depthwise": (lambda: nn.Conv2d(6, 6, 3, groups=6), (2, 6, 8, 8)),
    "transposed and grouped": (lambda: nn.ConvTranspose2d(4, 6, 3, 2, groups=2), (2, 4, 5, 5)),
    "linear": (lambda: nn.Linear(12, 7), (3, 5, 12)),
    "products": (Products, (3, 5, 7)),
    "attention": (lambda: Whole(nn.MultiheadAttention(16, 4, batch_first=True), 3), (2, 6, 16)),
    "encoder": (lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), (2, 5, 16)),
    "recurrent": (lambda: Whole(nn.RNN(8, 10, batch_first=True)), (2, 5, 8)),
    "LSTM": (lambda: Whole(nn.LSTM(8, 10, 2, batch_first=True, bidirectional=True)), (2, 5, 8)),
    "GRU": (lambda: Whole(nn.GRU(8, 10, batch_first=True)), (2, 5, 8)),
    "cell": (lambda: Whole(nn.LSTMCell(8, 10)), (4, 8)),
}
_GROUPS = {"grouped": 2, "depthwise": 6, "transposed and grouped": 2}


@pytest.mark.parametrize("name", MODULES)
def test_torchs_counter_finds_the_same_in_a_step(name: str) -> None:
    make, shape = MODULES[name]
    # On "meta", where recurrent layers and attention come as the products that they are made of.
    with torch.device("meta"):
        network, inputs = make(), torch.zeros(shape, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        out = network(inputs)
    with FlopCounterMode(display=False) as backward:
        out.float().sum().backward()
    found = count(network, inputs)
    once, both = forward.get_total_flops(), backward.get_total_flops()
    if name in _GROUPS:
        # Torch takes a grouped convolution's gradient of the weights for one of all groups together.
        assert both == once * (1 + _GROUPS[name])
        both = 2 * once
    assert found.flops("forward") == once > 0
    assert found.flops("dgrad", "wgrad") == both
    assert found.uncounted == ()


# torchvision's weights tell their GMAC at 224 pixels ("_ops"); ViT-B/16: torchvision 17.564; EfficientNet-B0 0.386.
PUBLISHED = {"resnet50": 4.089, "vit_b_16": 17.564, "mobilenet_v2": 0.301, "efficientnet_b0": 0.386}
PUBLISHED["resnext50_32x4d"] = 4.23


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_multiply_adds_are_met(name: str) -> None:
    import torchvision

    with torch.device("meta"):
        network, inputs = torchvision.models.get_model(name), torch.zeros(1, 3, 224, 224)
    ours = count(network, inputs, train=False)
    assert ours.flops() / 2e9 == pytest.approx(PUBLISHED[name], rel=0.005)


def test_a_whole_resnet_trains_for_three_forward_passes_but_one_gradient() -> None:
    import timm

    with FakeTensorMode(allow_non_fake_inputs=True):
        network = timm.create_model("resnet50")
        with FlopCounterMode(display=False) as theirs, torch.autocast("cpu", torch.bfloat16):
            network(torch.zeros(2, 3, 224, 224)).float().mean().backward()
        with torch.autocast("cpu", torch.bfloat16):
            ours = count(network, torch.zeros(2, 3, 224, 224))
    first = sum(each.flops for each in ours.works if (each.layer, each.phase) == ("conv1", "forward"))
    assert ours.model_flops == 3 * ours.flops("forward") - first == theirs.get_total_flops()
    assert ours.flops("dgrad") == ours.flops("forward") - first
    assert ours.flops("loss") == 0
    assert ours.uncounted == ()


def test_the_sum_of_two_branches_gradients_is_of_no_layer() -> None:
    """Autograd adds them up after the last one's node, and casts of weights back are the weights' own."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.conv = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self.stem(inputs)
            return hidden + self.conv(hidden)

    with torch.autocast("cpu", torch.bfloat16):
        found = count(Residual(), torch.randn(2, 3, 16, 16))
    activations, weights = 2 * 8 * 256 * 2, (8 * 8 * 9 + 8) * 2
    own = {phase: works for (layer, phase), works in found.by_layer().items() if layer == "conv"}
    assert "add" not in {each.operator for each in own["dgrad"]}
    (added,) = (each for each in found.works if each.layer == SUM_OF_GRADIENTS)
    assert (added.phase, added.operator) == ("dgrad", "add")
    assert added.bytes_moved == 3 * activations
    (product,) = (each for each in own["wgrad"] if each.product)
    assert product.bytes_moved == 2 * activations + weights
    assert {each.operator for each in own["wgrad"]} <= {"convolution_backward", "_to_copy", "detach"}


def test_the_backward_pass_of_what_works_in_place_is_its_layer_s() -> None:
    """Autograd clones the input of such an activation for its gradient, and numbers the clone too."""
    network = nn.Sequential(nn.Linear(6, 8), nn.ReLU6(inplace=True), nn.Linear(8, 4), nn.SiLU(inplace=True))
    found = count(network, torch.randn(3, 6))
    for layer, operator in (("1", "hardtanh_backward"), ("3", "sigmoid")):
        assert operator in {each.operator for each in found.works if (each.layer, each.phase) == (layer, "dgrad")}
    assert not [each for each in found.works if each.phase == "loss" and "tanh" in each.operator]
    # The clone is a real one: read and written, beside the activation's own reading and writing.
    moved = sum(each.bytes_moved for each in found.works if (each.layer, each.phase) == ("1", "forward"))
    assert moved == 4 * (4 * 3 * 8)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + gradient


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(x)


def test_a_sum_in_a_gradient_of_one_s_own_is_its_layer_s() -> None:
    found = count(nn.Sequential(nn.Linear(6, 8), Doubling()), torch.randn(3, 6))
    assert {each.layer for each in found.works if each.phase == "dgrad" and each.operator == "add"} == {"1"}
