"""Activations that are computed again give the very same gradients, and memory back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from paceline.errors import ModelError
from paceline.models.recompute import _policy, blocks_of, recompute_blocks
from paceline.models.small_resnet import small_resnet

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_heads": 2, "depth": 3, "num_classes": 3}


def vit(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", **{**VIT, "drop_rate": 0.1, "proj_drop_rate": 0.2, **options})


NETWORKS: Mapping[str, Callable[[], nn.Module]] = {
    "vit": vit,
    "vit, attention with dropout": lambda: vit(attn_drop_rate=0.3),
    "resnet": lambda: timm.create_model("resnet10t", num_classes=3, drop_path_rate=0.2),
    # Squeeze and excitation: an activation in place right after a convolution.
    "squeezed": lambda: timm.create_model("seresnet18", num_classes=3, channels=(4, 4, 8, 8), layers=(1, 1, 1, 1)),
    # Its layers take lists that grow behind them.
    "dense": lambda: timm.create_model("densenet121", num_classes=3, growth_rate=4, block_config=(2, 2)),
    "own": lambda: small_resnet(3, 3, width=8, stages=2, depth=1, dropout=0.1),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[name]()


class LiveMemory(TorchDispatchMode):
    """Remembers what is allocated inside, and can say how much of it is still there."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor):
                reference = StorageWeakRef(each.untyped_storage())
                self._seen[reference.cdata] = (reference, each.untyped_storage().nbytes())
        return out

    def live_bytes(self) -> int:
        return sum(size for reference, size in self._seen.values() if not reference.expired())


def step(network: nn.Module, *, bf16: bool = False) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
    """Gradients and buffers after one pass, and the bytes that the forward pass has left behind for the backward."""
    images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    network.train()
    with LiveMemory() as memory, torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        loss = network(images).float().square().sum()
        left = memory.live_bytes()
    loss.backward()
    gradients = {name: each.grad for name, each in network.named_parameters() if each.grad is not None}
    return gradients, dict(network.named_buffers()), left


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("how", ["full", "selective"])
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_and_statistics_are_the_same_to_the_bit(name: str, how: Any, bf16: bool) -> None:
    plain, other = made(name), made(name)
    assert recompute_blocks(other, how)
    assert list(other.state_dict()) == list(plain.state_dict())
    for _ in range(2):
        expected, found = step(plain, bf16=bf16), step(other, bf16=bf16)
        assert expected[0].keys() == found[0].keys()
        for wanted, ours in zip(expected[:2], found[:2], strict=True):
            assert [key for key in wanted if not torch.equal(ours[key], wanted[key])] == []


@pytest.mark.parametrize("make", [vit, lambda: small_resnet(3, 3, width=8, stages=2, depth=3)], ids=["vit", "resnet"])
def test_memory_is_saved_most_by_full_and_much_by_selective(make: Callable[[], nn.Module]) -> None:
    def left(how: Any) -> int:
        network = make()
        if how is not None:
            recompute_blocks(network, how)
        return step(network)[2]

    kept = {how: left(how) for how in (None, "selective", "full")}
    assert kept["full"] < 0.5 * kept[None], kept
    assert kept["full"] < kept["selective"] < 0.75 * kept[None], kept


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        (vit, ["blocks.0", "blocks.1", "blocks.2"]),
        (NETWORKS["resnet"], ["layer1.0", "layer2.0", "layer3.0", "layer4.0"]),
        (torchvision.models.resnet18, [f"layer{stage}.{block}" for stage in range(1, 5) for block in (0, 1)]),
        (NETWORKS["own"], ["stages.0", "stages.1"]),
        (
            lambda: torchvision.models.vit_b_16(image_size=32, num_classes=2),
            [f"encoder.layers.encoder_layer_{number}" for number in range(12)],
        ),
        (
            lambda: timm.create_model("convnext_atto", num_classes=2),
            [f"stages.{stage}.blocks.{block}" for stage, depth in enumerate((2, 2, 6, 2)) for block in range(depth)],
        ),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 4)), []),
    ],
)
def test_blocks_are_found(network: Callable[[], nn.Module], expected: list[str]) -> None:
    assert blocks_of(network()) == expected


def test_a_copy_computes_with_its_own_weights() -> None:
    network = vit()
    recompute_blocks(network, "full")
    other = copy.deepcopy(network).eval()
    before = other(torch.ones(1, 3, 32, 32))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    assert torch.equal(other(torch.ones(1, 3, 32, 32)), before)


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_attention_is_kept_unless_it_drops_out(kind: str) -> None:
    """What is drawn after it would otherwise be other numbers the second time."""
    operation = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention").default
    plain = [0.0] * [each.name for each in operation._schema.arguments].index("dropout_p")
    assert _policy(None, operation, *plain, 0.0) is CheckpointPolicy.MUST_SAVE
    assert _policy(None, operation, *plain) is CheckpointPolicy.MUST_SAVE
    assert _policy(None, operation, *plain, 0.1) is CheckpointPolicy.PREFER_RECOMPUTE
    assert _policy(None, operation, *plain, dropout_p=0.1) is CheckpointPolicy.PREFER_RECOMPUTE


def test_networks_without_blocks_and_statistics_of_other_norms_are_named() -> None:
    with pytest.raises(ModelError, match="the network has no repeated blocks"):
        recompute_blocks(nn.Sequential(nn.Flatten(), nn.Linear(4, 4)), "full")
    with pytest.raises(ModelError, match=r"stages.0 has BatchNorm2d, .* a compiled block would update twice"):
        recompute_blocks(made("own"), "selective", compiled=True)

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Conv2d(3, 3, 1), nn.InstanceNorm2d(3, affine=True, track_running_stats=True)

    with pytest.raises(ModelError, match="0 has InstanceNorm2d"):
        recompute_blocks(nn.Sequential(Odd()), "full")


@pytest.mark.parametrize("how", [True, "selective"])
def test_a_run_is_the_same_run(train_tiny: Callable[..., Any], how: object) -> None:
    asked = {"model.options.dropout": 0.3, "train.ema": 0.9, "batch.micro_size": 8, "train.precision": "bf16"}
    plain = train_tiny("plain", asked)
    recomputed = train_tiny("recomputed", {**asked, "model.activation_checkpointing": how})
    assert recomputed.summary.weights_sha256 == plain.summary.weights_sha256
    assert recomputed.summary.ema_sha256 == plain.summary.ema_sha256


@pytest.mark.parametrize("how", ["full", pytest.param("selective", marks=pytest.mark.thorough)])
def test_a_compiled_run_recomputes_too(train_tiny: Any, tiny_task: Any, events: Any, how: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
            self.blocks = nn.ModuleList(copy.deepcopy(layer) for _ in range(2))
            self.head = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.flatten(1, 2)
            for block in self.blocks:
                x = block(x)
            return self.head(x.mean(dim=1))

    asked = {"model.compile": True, "model.compile_backend": "aot_eager", "model.activation_checkpointing": how}
    short = {"train.duration": "2 steps", "evaluate.every": "1 epochs"}
    plain = train_tiny("plain", short, task=tiny_task(make_network=Net))
    result = train_tiny("compiled", {**short, **asked}, task=tiny_task(make_network=Net))
    (measured,) = events(result.run_dir, "measurement")
    assert measured["gradient_error"] < 1e-4
    assert [e for e in events(result.run_dir, "incident") if e["incident"] == "recompile"] == []
    assert result.metrics["loss"] == pytest.approx(plain.metrics["loss"], rel=1e-3)
