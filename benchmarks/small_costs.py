"""What do small things cost that decisions give a figure for? Processor time on one thread.

Random numbers without state, looking at every gradient for numbers that are none, biases before BatchNorm.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from hardware import spread, write_result
from torch import nn
from torch.nn import functional as F

from paceline.data.order import epoch_order
from paceline.data.random_draws import seed_of
from paceline.models.small_resnet import small_resnet

ROUNDS = 9


def processor_seconds(call: Callable[[], Any], times: int = 1) -> float:
    """Of one call, on average over ``times``."""
    begun = time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - begun) / times


def draws() -> dict[str, Any]:
    """Hashing and re-seeding before a forward pass, and the order of an epoch of ImageNet."""
    steps = iter(range(10**9))

    def reseed() -> None:
        torch.default_generator.manual_seed(seed_of(0, next(steps), 0))

    epochs = iter(range(10**6))
    return {
        "reseeding_microseconds": spread([processor_seconds(reseed, 20_000) * 1e6 for _ in range(ROUNDS)]),
        "order_seconds": spread(
            [processor_seconds(lambda: epoch_order(0, next(epochs), 1_281_167)) for _ in range(ROUNDS)]
        ),
    }


def step_of(network: nn.Module, images: torch.Tensor) -> Callable[[], None]:
    """A training step with momentum."""
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-4, momentum=0.9)
    labels = torch.zeros(len(images), dtype=torch.int64)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(network(images), labels).backward()
        optimizer.step()

    return step


def looking_at_gradients() -> dict[str, Any]:
    """One look at all gradients of a small network, over a step of 64 images of 32 pixels."""
    network = small_resnet(10, 3)
    step = step_of(network, torch.randn(64, 3, 32, 32))
    step()
    gradients = [each.grad for each in network.parameters() if each.grad is not None]

    def look() -> bool:
        return bool(nn.utils.get_total_norm(gradients).isfinite())

    shares = [processor_seconds(look, 20) / processor_seconds(step) for _ in range(ROUNDS)]
    return {"share": spread(shares)}


def biases_before_batchnorm() -> dict[str, Any]:
    """A step of six layers of convolution and BatchNorm without biases, over the same with them, in turns."""
    images = torch.randn(32, 3, 32, 32)
    steps = {}
    for bias in (True, False):
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for before, after in ((3, 32), *[(32, 32)] * 5):
            layers += [nn.Conv2d(before, after, 3, padding=1, bias=bias), nn.BatchNorm2d(after), nn.ReLU()]
        steps[bias] = step_of(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), images)
        steps[bias]()
    gains = [processor_seconds(steps[True], 3) / processor_seconds(steps[False], 3) for _ in range(ROUNDS)]
    return {"times_as_fast_without": spread(gains)}


def main() -> int:
    """Measure all of it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = {part.__name__: part() for part in (draws, looking_at_gradients, biases_before_batchnorm)}
    lines = [
        f"{name}, {what}: {each['median']:.4g} ({each['minimum']:.4g} to {each['maximum']:.4g}, n = {each['runs']})."
        for name, figures in found.items()
        for what, each in figures.items()
    ]
    write_result("small-costs", found, lines)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
