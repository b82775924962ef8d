"""Rules of thumb that counting settles: bytes, arithmetic, samples, streams; the same on any machine.

``python benchmarks/counted.py`` writes the result file; ``tests/docs/test_counted.py`` compares each count with it.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hardware import write_result
from PIL import Image
from timm import create_model
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DistributedSampler
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import resnet50

from paceline.data.image.decode import Box, LazyImage
from paceline.data.image.transforms import resized_part
from paceline.data.order import StepGeometry, evaluation_slices
from paceline.host.devices import DEVICES
from paceline.host.world import World
from paceline.models.lecture_net import lecture_net
from paceline.models.recompute import recompute_blocks
from paceline.models.small_resnet import small_resnet
from paceline.optim.build import ExponentialMovingAverage
from paceline_advisor.formulas.catalogue import published
from paceline_advisor.formulas.network import tile_overhead, training_state_bytes, zero_bytes

# The formulas of the tables, by name.
rule = SimpleNamespace(**{each.name: each.function for each in published()})

Figures = dict[str, float]
COUNTS: dict[str, Callable[[], Figures]] = {}


def counted(function: Callable[[], Figures]) -> Callable[[], Figures]:
    """Have a count made with all others."""
    COUNTS[function.__name__] = function
    return function


def kept_bytes(network: nn.Module, images: torch.Tensor) -> int:
    """Bytes of tensors that a forward pass keeps for the backward pass, weights and the images left out."""
    own = {parameter.data_ptr() for parameter in network.parameters()} | {images.data_ptr()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = network(images)
    assert result is not None
    return sum(kept.values())


@counted
def bytes_of_a_batch() -> Figures:
    """What crosses to the device for 256 images of 224 pixels with their labels, as floats and as bytes."""
    images, labels = torch.zeros(256, 3, 224, 224, dtype=torch.uint8), torch.zeros(256, dtype=torch.int64)
    each = {kind: images.to(kind).nbytes + labels.nbytes for kind in (torch.float32, torch.bfloat16, torch.uint8)}
    return {
        "fp32 over uint8": each[torch.float32] / each[torch.uint8],
        "bf16 over uint8": each[torch.bfloat16] / each[torch.uint8],
    }


@counted
def moving_average_memory() -> Figures:
    """Numbers that a moving average holds, beside those of the weights and of a training with momentum."""
    network = lecture_net(10)
    average = ExponentialMovingAverage(network, 0.999)
    numbers = sum(each.numel() for each in network.parameters())
    held = sum(each.numel() for each in average.module.parameters())
    with_average = training_state_bytes(numbers, 1, ema=True)
    return {"over the weights": held / numbers, "over the state": with_average / training_state_bytes(numbers, 1)}


@counted
def seeds_of_streams() -> Figures:
    """Different sums of seed, local rank and worker, for 8 processes of 5 workers on each of one and two nodes."""
    one = [42 + local_rank + worker for local_rank in range(8) for worker in range(5)]
    return {"streams": len(one), "different": len(set(one)), "on two nodes": len(set(one + one))}


@counted
def bias_before_batchnorm() -> Figures:
    """What a bias of a convolution adds to the output and gradient of the BatchNorm after it, in double precision."""
    torch.manual_seed(0)
    convolution, norm = nn.Conv2d(8, 16, 3).double(), nn.BatchNorm2d(16).double()
    assert convolution.bias is not None
    images = torch.randn(4, 8, 10, 10, dtype=torch.float64)
    with_bias = norm(convolution(images))
    (with_bias * torch.randn_like(with_bias)).sum().backward()
    without = norm(F.conv2d(images, convolution.weight))
    weight_gradient, bias_gradient = convolution.weight.grad, convolution.bias.grad
    assert weight_gradient is not None
    assert bias_gradient is not None
    return {
        "change of the output": float((with_bias - without).detach().abs().max()),
        "its gradient over the weights'": float(bias_gradient.abs().max() / weight_gradient.abs().max()),
    }


@counted
def adam_state() -> Figures:
    """Numbers of state for each parameter, step counters left out."""
    network = lecture_net(10)
    optimizer = torch.optim.Adam(network.parameters())
    network(torch.zeros(1, 3, 32, 32)).sum().backward()
    optimizer.step()
    held = sum(each.numel() for state in optimizer.state.values() for each in state.values() if each.dim() > 0)
    return {"numbers for each parameter": held / sum(each.numel() for each in network.parameters())}


@counted
def lecture_network() -> Figures:
    """Parameters of the lecture's network, and the bytes that PyTorch's allocator counts for them on a GPU."""
    sizes = [each.numel() for each in lecture_net(10).parameters()]
    return {"parameters": sum(sizes), "bytes": rule.allocated_bytes([4 * size for size in sizes])}


@counted
def activations() -> Figures:
    """Bytes kept for the backward pass by batch, and without gradients."""
    network = lecture_net(10)
    small, large = (kept_bytes(network, torch.zeros(batch, 3, 32, 32)) for batch in (32, 64))
    with torch.no_grad():
        none = kept_bytes(network, torch.zeros(64, 3, 32, 32))
    return {"64 over 32": large / small, "without gradients": none, "MB at 64": large / 1e6}


@counted
def evaluated_samples() -> Figures:
    """Samples that four processes score of ten: with a padding sampler, and by Paceline's order."""
    ten = list(range(10))
    padded = sum(len(list(DistributedSampler(ten, num_replicas=4, rank=rank, shuffle=False))) for rank in range(4))
    worlds = [World(rank=rank, world_size=4) for rank in range(4)]
    ours = [int(i) for world in worlds for part in evaluation_slices(10, 2, world) for i in part.ids]
    # 101 samples on two processes, all right but the only one of the second.
    return {
        "padded": padded,
        "Paceline": len(ours),
        "Paceline, different": len(set(ours)),
        "mean of accuracies": (100.0 + 0.0) / 2,
        "accuracy": 100 * 100 / 101,
    }


@counted
def dropped_samples() -> Figures:
    """Samples of an epoch of 1,438 that 4 processes train on in batches of 64, without the last one and by Paceline."""
    kept = 1438 // 64 * 64
    geometry = StepGeometry(seed=0, samples=1438, global_batch_size=64, logical_ranks=4)
    steps = -(-1438 // 64)
    worlds = [World(rank=rank, world_size=4) for rank in range(4)]
    parts = [each for step in range(steps) for world in worlds for each in geometry.slices(step, world)]
    ids = [int(i) for each in parts for i in each.ids]
    return {
        "dropped": 1438 - kept,
        "Paceline drops": 1438 - len(set(ids)),
        "Paceline repeats": len(ids) - len(set(ids)),
    }


@counted
def accumulated_gradients() -> Figures:
    """How far the sum of four micro-batches' gradients is from a whole batch's, relative, by what lies between."""
    found: Figures = {}
    for name, norm in (("without BatchNorm", nn.Identity()), ("with BatchNorm", nn.BatchNorm1d(32))):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(16, 32), norm, nn.ReLU(), nn.Linear(32, 4)).double()
        inputs, labels = torch.randn(64, 16, dtype=torch.float64), torch.randint(4, (64,))
        gradients = []
        for parts in (1, 4):
            network.zero_grad()
            for x, y in zip(inputs.chunk(parts), labels.chunk(parts), strict=True):
                (F.cross_entropy(network(x), y) / parts).backward()
            gradients.append(torch.cat([each.grad.flatten() for each in network.parameters() if each.grad is not None]))
        found[name] = float((gradients[1] - gradients[0]).norm() / gradients[0].norm())
    return found


@counted
def loss_scaler() -> Figures:
    """Steps between two doublings of the loss scale that PyTorch's own scaler takes, over the 100 of the notes."""
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    return {"default interval": scaler.get_growth_interval(), "over 100": scaler.get_growth_interval() / 100}


@counted
def intensity_at_128() -> Figures:
    """FLOP per byte of linear layers of 128 and 4,096 features at a batch of 128, and what GPUs need to be busy."""
    found = {"all 128": rule.gemm_intensity(128, 128, 128), "4,096 features": rule.gemm_intensity(128, 4096, 4096)}
    for name in ("v100-16gb", "a100-40gb", "h100"):
        device = DEVICES[name]
        found[name] = rule.ridge_point(device.flops_per_second["fp16"], device.bytes_per_second)
    return found


@counted
def one_column_too_many() -> Figures:
    """Work of a product of 256 rows and 257 columns over that of 256, asked for and computed in tiles of 128."""
    return {"asked for": 257 / 256, "computed": 257 / 256 * tile_overhead(256, 257) / tile_overhead(256, 256)}


@counted
def four_channels() -> Figures:
    """What a fourth channel of zeros adds to the arithmetic of ResNet-50, at 224 pixels."""
    with FlopCounterMode(display=False) as counter, torch.device("meta"):
        resnet50()(torch.zeros(1, 3, 224, 224))
    whole, first = counter.get_total_flops(), 2 * 112 * 112 * 64 * 7 * 7 * 3
    return {"of the first layer": 4 / 3 - 1, "of the network": first / 3 / whole}


@counted
def sharded_state() -> Figures:
    """State of a model over 8 GPUs, over one copy: DDP's on all of them together, and FSDP's."""
    one = zero_bytes(1e9, 0)
    return {"DDP": 8 * one / one, "FSDP": 8 * zero_bytes(1e9, 3, 8) / one}


@counted
def depthwise() -> Figures:
    """FLOP per byte of a 3x3 convolution of 256 channels, 14 pixels, batch 256: depthwise, and of all channels."""
    sizes = {"batch": 256, "channels": 256, "size": 14, "filters": 256, "kernel": 3}
    return {"depthwise": rule.convolution_intensity(**sizes, groups=256), "dense": rule.convolution_intensity(**sizes)}


@counted
def lecture_table() -> Figures:
    """The lecture's table of images/s, CPU and GPU by batch size; and what copying a batch of 2 takes of its step."""
    table = {64: (1474, 5369), 4: (1350, 1633), 2: (860, 937)}
    rows = {f"at {batch}": gpu / cpu for batch, (cpu, gpu) in table.items()}
    copied = (2 * 3 * 32 * 32 * 4 + 2 * 8) / 1e9  # seconds at 1 GB/s, which is slow
    ahead = sum(gpu > cpu for cpu, gpu in table.values())
    return {**rows, "rows": len(table), "GPU ahead": ahead, "copying": copied / (2 / table[2][1])}


@counted
def border() -> Figures:
    """What a border of 4 pixels adds to images of 32."""
    return {"added": (32 + 2 * 4) ** 2 / 32**2 - 1}


class _Living(TorchDispatchMode):
    """Remembers what is allocated inside, and how much of it is still there."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor):
                reference = StorageWeakRef(each.untyped_storage())
                self._seen[reference.cdata] = (reference, each.untyped_storage().nbytes())
        return result

    def living_bytes(self) -> int:
        """Bytes of what is still there."""
        return sum(size for reference, size in self._seen.values() if not reference.expired())


@counted
def recomputed() -> Figures:
    """Share of the bytes that a forward pass leaves behind, of three transformer blocks and of six residual ones."""
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_heads": 2, "depth": 3, "num_classes": 3}
    drops = {"drop_rate": 0.1, "proj_drop_rate": 0.2}
    found: Figures = {}
    for name, build in (
        ("transformer", lambda: create_model("vit_tiny_patch16_224", **sizes, **drops)),
        ("residual", lambda: small_resnet(3, 3, width=8, stages=2, depth=3)),
    ):
        left = {}
        for how in ("off", "selective", "full"):
            torch.manual_seed(0)
            network = build().train()
            if how != "off":
                recompute_blocks(network, how)
            images = torch.ones(8, 3, 32, 32)
            with _Living() as memory:
                loss = network(images).square().sum()
                left[how] = memory.living_bytes()
            del loss
        found |= {f"{name}, {how}": left[how] / left["off"] for how in ("selective", "full")}
    return found


@counted
def shrunk_decoding() -> Figures:
    """Grey levels between crops of noise decoded at a half, a quarter or an eighth, and in full: the worst of three."""
    pixels = np.random.default_rng(0).integers(0, 256, (900, 1200, 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "JPEG", quality=90)
    picture, box = LazyImage(content.getvalue(), 3), Box(16, 32, 800, 1040)
    found = []
    for shrink in (2, 4, 8):
        smaller, full = (resized_part(picture.part(box, each), 800 // (2 * shrink)).int() for each in (shrink, 1))
        found.append((smaller - full).abs().float())
    return {
        "mean": max(float(levels.mean()) for levels in found),
        "within 8": min(float((levels <= 8).float().mean()) for levels in found),
        "most": max(float(levels.max()) for levels in found),
    }


@counted
def threads_of_a_p100() -> Figures:
    """56 multiprocessors of 2,048 threads."""
    return {"threads": 56 * 2048}


@counted
def imagenet_in_an_hour() -> Figures:
    """What the headline's own figures give: the batch, the rate, and the epochs' images per second."""
    return {
        "batch": 256 * 32,
        "rate": 0.1 * 256 * 32 / 256,
        "images/s at 90 epochs in 60 minutes": 90 * 1_281_167 / 3600,
    }


def main() -> int:
    """Count everything, or what is named, and write it down."""
    figures = {name: count() for name, count in COUNTS.items() if not sys.argv[1:] or name in sys.argv[1:]}
    lines = ["| counted | what | figure |", "|---|---|---|"]
    lines += [f"| {name} | {what} | {value:.6g} |" for name, all_ in figures.items() for what, value in all_.items()]
    path = write_result("counted", {"runs": 1, "figures": figures}, lines)
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    np.seterr(all="raise")
    sys.exit(main())
