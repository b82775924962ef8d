"""What does DDP add to a step's work on the host, for each parameter tensor?

python benchmarks/ddp_host.py

Convolutions and norms of two channels each, so that computing takes next to nothing, in one process that is a world of
one: the difference between a step with and without DDP is hooks, copies into and out of buckets and, if asked for, the
copies of buffers. Nothing is launched on a GPU; how many kernels that would be is counted.
"""

from __future__ import annotations

import statistics
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from hardware import spread, write_result
from torch import nn
from torch.profiler import ProfilerActivity, profile

LAYERS = 100
ROUNDS = 200
# As published loops wrap their networks, and as ours does.
WAYS: dict[str, dict[str, Any]] = {
    "as torch's defaults have it": {},
    "as Paceline does": {"gradient_as_bucket_view": True, "broadcast_buffers": False},
}
# A copy or product of tensors is a kernel on a GPU; a number that becomes a tensor first is not.
KERNELS = ("aten::copy_", "aten::mul")
NOT_KERNELS = ("aten::_to_copy",)


def network() -> nn.Module:
    """Three parameter tensors and three buffers for each layer, as a residual network has them."""
    torch.manual_seed(0)
    pairs = [(nn.Conv2d(2, 2, 1, bias=False), nn.BatchNorm2d(2)) for _ in range(LAYERS)]
    return nn.Sequential(*[module for pair in pairs for module in pair])


def step(model: nn.Module, inputs: torch.Tensor) -> float:
    """Processor seconds of a forward and backward pass: what others do on these cores is not in them."""
    for parameter in model.parameters():
        parameter.grad = None
    started = time.process_time()
    model(inputs).sum().backward()
    return time.process_time() - started


def kernels(model: nn.Module, inputs: torch.Tensor) -> int:
    """Operators of a step that would be kernels, of those that DDP adds to."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        step(model, inputs)
    counts = {each.key: each.count for each in recorded.key_averages()}
    return sum(counts.get(name, 0) for name in KERNELS) - sum(counts.get(name, 0) for name in NOT_KERNELS)


def main() -> None:
    """Let the ways take turns, and write the result."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    inputs = torch.randn(2, 2, 2, 2)
    models: dict[str, nn.Module] = {"bare": network()}
    models |= {name: nn.parallel.DistributedDataParallel(network(), **how) for name, how in WAYS.items()}
    tensors = len(list(models["bare"].parameters()))
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(ROUNDS):
        for name, model in models.items():
            seconds[name].append(step(model, inputs))
    counted = {name: kernels(model, inputs) for name, model in models.items()}
    dist.destroy_process_group()
    result: dict[str, Any] = {"tensors": tensors}
    lines = [
        f"A network of {tensors} parameter tensors, one process, median of {ROUNDS} turns; beside the bare network.",
        "",
        "| DDP | added processor time per tensor | kernels per tensor |",
        "|---|---|---|",
    ]
    for name in WAYS:
        pairs = zip(seconds[name], seconds["bare"], strict=True)
        added = [(each - bare) / tensors * 1e6 for each, bare in pairs]
        more = (counted[name] - counted["bare"]) / tensors
        result[name] = {"microseconds_per_tensor": spread(added), "kernels_per_tensor": more}
        lines.append(f"| {name} | {statistics.median(added):.1f} µs | {more:.1f} |")
    print("\n".join(lines))
    print(write_result("ddp-host", result, lines))


if __name__ == "__main__":
    main()
