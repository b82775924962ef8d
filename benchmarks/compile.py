"""What does `model.compile` gain on this machine, and after how many steps has it paid for its compiler?

A training step (forward, backward, SGD) and an evaluation batch, compiled and not, for each precision. They take turns,
so that a drifting machine slows all alike; ratios are taken round by round. Networks are laid out channels last.

    python benchmarks/compile.py [--network resnet18] [--batch 32] [--size 224] [--rounds 7]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hardware import spread, write_result
from networks import NETWORKS, build

from paceline.host.machine import available_cores
from paceline.models.compiled import CompiledNetwork, CompileLog
from paceline.recipe.model import ModelSection

WAYS = ("train", "evaluate")


@dataclass(frozen=True)
class Job:
    """One network in one precision, compiled and not."""

    network: torch.nn.Module
    compiled: CompiledNetwork
    images: torch.Tensor
    labels: torch.Tensor
    optimizer: torch.optim.Optimizer
    bf16: bool

    def train(self, called: Callable[..., Any]) -> None:
        """One training step."""
        self.network.train()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.bf16):
            loss = F.cross_entropy(called(self.images), self.labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def evaluate(self, called: Callable[..., Any]) -> None:
        """One evaluation batch."""
        self.network.eval()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.bf16):
            called(self.images)


def make(options: argparse.Namespace, *, bf16: bool) -> Job:
    """Build a network, and what would be called instead."""
    torch.manual_seed(0)
    network = build(options.network).to(memory_format=torch.channels_last)
    sizes = {"train_sizes": (options.batch,), "evaluation_sizes": (options.batch,)}
    compiled = CompiledNetwork(network, ModelSection(compile=True), log=CompileLog(), **sizes)
    images = torch.randn(options.batch, 3, options.size, options.size).contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    return Job(network, compiled, images, torch.randint(0, 10, (options.batch,)), optimizer, bf16)


def timed(action: Callable[[Any], None], called: Any) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    action(called)
    return time.perf_counter() - started


def measure(job: Job, variant: str, rounds: int) -> dict[str, Any]:
    """Time one thing compiled and not, in turns, after both have been done twice."""
    action = getattr(job, variant)
    first = timed(action, job.compiled)
    action(job.network)
    usual = timed(action, job.compiled)
    action(job.network)
    plain, compiled = [], []
    for _ in range(rounds):
        plain.append(timed(action, job.network))
        compiled.append(timed(action, job.compiled))
    gained = spread(plain)["median"] - spread(compiled)["median"]
    cost = first - usual
    return {
        "speedup": spread([one / other for one, other in zip(plain, compiled, strict=True)]),
        "uncompiled_seconds": spread(plain),
        "compiled_seconds": spread(compiled),
        "first_call_seconds": first,
        "calls_until_paid": cost / gained if gained > 0 else None,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=NETWORKS, default="resnet18")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    torch.set_num_threads(available_cores())
    with tempfile.TemporaryDirectory(prefix="inductor-") as empty:
        # The first call is to be one on a machine that has never compiled this.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = empty
        found, lines = run(options)
    print("\n".join(lines))
    settings = {"network": options.network, "batch_size": options.batch, "image_size": options.size}
    print(write_result(f"compile-{options.network}", {"results": found, **settings}, lines))


def run(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Measure everything, and say it in words."""
    found: dict[str, Any] = {}
    lines: list[str] = []
    for bf16 in (False, True):
        precision = "bf16" if bf16 else "fp32"
        job = make(options, bf16=bf16)
        for variant in WAYS:
            found[f"{precision} {variant}"] = result = measure(job, variant, options.rounds)
            speedup, paid = result["speedup"], result["calls_until_paid"]
            lines.append(
                f"{precision} {variant}: compiled {speedup['median']:.2f} times as fast ({speedup['minimum']:.2f} to "
                f"{speedup['maximum']:.2f}, {speedup['runs']} rounds); the first call took "
                f"{result['first_call_seconds']:.0f} s, "
                + ("which never pays." if paid is None else f"which pays after {paid:.0f} calls.")
            )
    return found, lines


if __name__ == "__main__":
    main()
