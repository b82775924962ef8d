"""Is bf16 with channels_last faster than fp32 on this CPU, for the network of the cifar10 recipe?

One training step (forward, backward, SGD) at batch 256 on 32x32 images, for the four combinations of precision and
memory format. They take turns, so that a drifting machine slows all alike; ratios are taken round by round.

    python benchmarks/precision.py [--rounds 7]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from hardware import spread, write_result

from paceline.models.small_resnet import small_resnet

BATCH = 256
COMBINATIONS = [(bf16, last) for bf16 in (False, True) for last in (False, True)]


def name(bf16: bool, channels_last: bool) -> str:
    """The combination in words."""
    return f"{'bf16' if bf16 else 'fp32'} {'channels_last' if channels_last else 'contiguous'}"


def stepper(bf16: bool, channels_last: bool) -> Callable[[], None]:
    """A training step in one combination."""
    torch.manual_seed(0)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = small_resnet(10).to(memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = torch.randn(BATCH, 3, 32, 32).contiguous(memory_format=layout)
    labels = torch.randint(0, 10, (BATCH,))

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    steps = {name(*combination): stepper(*combination) for combination in COMBINATIONS}
    for step in steps.values():
        step()
    seconds: dict[str, list[float]] = {label: [] for label in steps}
    for _ in range(options.rounds):
        for label, step in steps.items():
            begun = time.perf_counter()
            step()
            step()
            seconds[label].append((time.perf_counter() - begun) / 2)
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
    print(write_result("cpu-precision", {"speedups": speedups, "batch_size": BATCH}, lines))


if __name__ == "__main__":
    main()
