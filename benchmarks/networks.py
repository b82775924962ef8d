"""The networks that benchmarks of arithmetic are about, by name; for images of ten classes."""

from __future__ import annotations

import torch
import torchvision

from paceline.models.small_resnet import small_resnet

NETWORKS = ("small_resnet", "resnet18", "resnet50")


def build(name: str) -> torch.nn.Module:
    """Build one of them."""
    if name == "small_resnet":
        return small_resnet(10)
    return torchvision.models.get_model(name, num_classes=10)
