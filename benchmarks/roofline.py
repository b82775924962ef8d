"""How far above its bound a real training step is, for each network and phase.

The bound of `paceline roofline` is compared with real steps (forward, backward, SGD with momentum) here: on a
CPU with its measured peaks, on a GPU of the table by its maker's. Networks take turns; the median of the rounds counts.
A ratio below 1 would mean that the bound is none.

    python benchmarks/roofline.py [--rounds 5] [--dry-run]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import timm
import torch
from hardware import spread, write_result
from torch import nn
from torch.nn import functional as F

from paceline.models.ceilings import Ceilings
from paceline.models.flops import StepWork, WorkCounter
from paceline_advisor.roofline.study import choose

# Network, size of images, samples on a CPU and on a GPU.
CASES = (
    ("resnet18", 64, 16, 256),
    ("resnet50", 64, 8, 256),
    ("mobilenetv2_100", 64, 16, 256),
    ("vit_tiny_patch16_224", 224, 2, 256),
)


class Step:
    """A training step of a network on one batch, again and again."""

    def __init__(self, name: str, size: int, batch: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.network: nn.Module = timm.create_model(name).to(device, memory_format=torch.channels_last)
        images = torch.randn(batch, 3, size, size, device=device)
        self.images = images.to(memory_format=torch.channels_last)
        self.labels = torch.zeros(batch, dtype=torch.long, device=device)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.001, momentum=0.9)
        self.device = device

    def loss(self) -> torch.Tensor:
        """In bf16, as a run computes it."""
        with torch.autocast(self.device.type, torch.bfloat16):
            return F.cross_entropy(self.network(self.images), self.labels)

    def __call__(self) -> None:
        """Forward, backward, update."""
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def counted(self) -> StepWork:
        """What a step does."""
        with WorkCounter(self.network) as counter:
            self.loss().backward()
            with counter.phase("optimizer"):
                self.optimizer.step()
        self.optimizer.zero_grad()
        return counter.work

    def seconds(self) -> float:
        """Time of one step, after all that went before."""
        return _seconds(self, self.device)


def _seconds(act: Callable[[], Any], device: torch.device) -> float:
    def settle() -> None:
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()

    settle()
    started = time.perf_counter()
    act()
    settle()
    return time.perf_counter() - started


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all cases in turns and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    named = choose(None)
    ceilings = Ceilings(named, "none", "bf16")
    steps = {
        name: Step(name, size, large if device.type == "cuda" else small, device) for name, size, small, large in CASES
    }
    bounds = {name: sum(map(ceilings.seconds, step.counted().works)) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_number in range(options.rounds + 1):
        for name, step in steps.items():
            seconds = step.seconds()
            if round_number:  # the first warms up
                times[name].append(seconds)
    rows, lines = [], ["| network | least | measured | measured / least |", "|---|---|---|---|"]
    for name, bound in bounds.items():
        middle = statistics.median(times[name])
        rows.append({"network": name, "least_seconds": bound, "ratio": middle / bound, **spread(times[name])})
        lines.append(f"| {name} | {1e3 * bound:.1f} ms | {1e3 * middle:.1f} ms | {middle / bound:.2f} |")
    source = f"{named.title}: {named.source.partition('; kept in')[0]}"  # where is this machine's affair
    print("\n".join([source, "", *lines]))
    if not options.dry_run:
        print(
            write_result("roofline", {"device": named.title, "peaks": source, "networks": rows}, [source, "", *lines])
        )


if __name__ == "__main__":
    main()
