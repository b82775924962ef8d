"""The networks that benchmarks of arithmetic are about, by name; for images of ten classes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from paceline.models.small_resnet import small_resnet

NETWORKS = ("small_resnet", "resnet18", "resnet50")


def build(name: str) -> torch.nn.Module:
    """Build one of them."""
    if name == "small_resnet":
        return small_resnet(10)
    return torchvision.models.get_model(name, num_classes=10)


def stepper(model: nn.Module, images: Tensor, *, bf16: bool) -> Callable[[], None]:
    """A training step of a network with ten classes on the CPU: forward, backward, SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    labels = torch.randint(0, 10, (len(images),))

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step
