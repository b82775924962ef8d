"""Is bf16 with channels_last faster than fp32 on this CPU, for the network of the cifar10 recipe, or for a ResNet?

One training step (forward, backward, SGD) at batch 256 on 32x32 images, for the four combinations of precision and
memory format. They take turns, so that a drifting machine slows all alike; ratios are taken round by round. ResNets
want photos: --network resnet50 --batch 16 --size 224.

    python benchmarks/precision.py [--network small_resnet] [--batch 256] [--size 32] [--rounds 7]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from hardware import spread, write_result
from networks import NETWORKS, build
from networks import stepper as step_of

from paceline.host.machine import available_cores

COMBINATIONS = [(bf16, last) for bf16 in (False, True) for last in (False, True)]


def name(bf16: bool, channels_last: bool) -> str:
    """The combination in words."""
    return f"{'bf16' if bf16 else 'fp32'} {'channels_last' if channels_last else 'contiguous'}"


def stepper(options: argparse.Namespace, bf16: bool, channels_last: bool) -> Callable[[], None]:
    """A training step in one combination."""
    torch.manual_seed(0)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    images = torch.randn(options.batch, 3, options.size, options.size).contiguous(memory_format=layout)
    return step_of(build(options.network).to(memory_format=layout), images, bf16=bf16)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=NETWORKS, default="small_resnet")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    torch.set_num_threads(available_cores())
    steps = {name(*combination): stepper(options, *combination) for combination in COMBINATIONS}
    for step in steps.values():
        step()
    seconds: dict[str, list[float]] = {label: [] for label in steps}
    for _ in range(options.rounds):
        for label, step in steps.items():
            started = time.perf_counter()
            step()
            step()
            seconds[label].append((time.perf_counter() - started) / 2)
    base = seconds[name(bf16=False, channels_last=False)]
    speedups = {
        label: spread([b / own for b, own in zip(base, values, strict=True)]) for label, values in seconds.items()
    }
    lines = [
        f"{label}: {speedup['median']:.2f} times as fast as fp32 contiguous ({speedup['minimum']:.2f} to "
        f"{speedup['maximum']:.2f}, {speedup['runs']} rounds)."
        for label, speedup in speedups.items()
    ]
    print("\n".join(lines))
    settings = {"network": options.network, "batch_size": options.batch, "image_size": options.size}
    claim = "cpu-precision" if options.network == "small_resnet" else f"cpu-precision-{options.network}"
    seconds_per_step = {label: spread(values) for label, values in seconds.items()}
    print(write_result(claim, {"speedups": speedups, "seconds_per_step": seconds_per_step, **settings}, lines))


if __name__ == "__main__":
    main()
