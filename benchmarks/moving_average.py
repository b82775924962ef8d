"""What does a moving average of the weights cost, and what does it bring?

Cost: processor time of one update, over that of a whole training step of the same network on one thread. Gain: top-1
of both sets of weights at the end of the same `digits` trainings.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from hardware import spread, write_result
from timm import create_model
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.models.lecture_net import lecture_net
from paceline.optim.build import ExponentialMovingAverage

CASES: dict[str, tuple[Any, int, int]] = {
    "lecture_net, batch 4": (lambda: lecture_net(10), 4, 32),
    "lecture_net, batch 64": (lambda: lecture_net(10), 64, 32),
    "resnet18, batch 2, 224 pixels": (lambda: create_model("resnet18"), 2, 224),
    "resnet18, batch 16, 224 pixels": (lambda: create_model("resnet18"), 16, 224),
}


def processor_seconds(network: nn.Module, batch: int, size: int, rounds: int) -> dict[str, list[float]]:
    """Processor time of steps with momentum, and of the updates of an average between them."""
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)
    average = ExponentialMovingAverage(network, 0.999)
    images, labels = torch.randn(batch, 3, size, size), torch.randint(10, (batch,))
    times: dict[str, list[float]] = {"step": [], "update": []}
    for number in range(rounds + 2):
        started = time.process_time()
        optimizer.zero_grad()
        F.cross_entropy(network(images), labels).backward()
        optimizer.step()
        between = time.process_time()
        average.update(number)
        ended = time.process_time()
        if number > 1:  # the first ones make buffers
            times["step"].append(between - started)
            times["update"].append(ended - between)
    return times


def trained(seed: int) -> dict[str, float]:
    """Top-1 in percent of the last evaluation of both sets of weights."""
    with tempfile.TemporaryDirectory() as folder:
        result = paceline.train("digits", overrides={"seed": seed}, run_dir=Path(folder) / "run")
    last: Any = result.metrics["last"]
    return {weights: float(last[weights]["top1_accuracy"]) for weights in ("model", "ema")}


def main() -> int:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    costs, lines = {}, []
    for name, (build, batch, size) in CASES.items():
        times = processor_seconds(build(), batch, size, given.rounds)
        shares = [update / step for update, step in zip(times["update"], times["step"], strict=True)]
        costs[name] = {"share": spread(shares), **{kind: spread(each) for kind, each in times.items()}}
        low, middle, high = min(shares), costs[name]["share"]["median"], max(shares)
        lines.append(f"{name}: an update takes {middle:.2%} of a step's processor time ({low:.2%} to {high:.2%}).")
    reached = {str(seed): trained(seed) for seed in given.seeds}
    gains = [each["ema"] - each["model"] for each in reached.values()]
    if gains:
        lines.append(
            f"digits, {len(gains)} seeds: the average's top-1 is {sum(gains) / len(gains):+.2f} points beside the "
            f"weights' own ({min(gains):+.2f} to {max(gains):+.2f}); one image is 0.28."
        )
    write_result("moving-average", {"costs": costs, "digits": reached, "gain": spread(gains) if gains else None}, lines)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
