"""Which update rule moves which parameters?"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from paceline.recipe.training import Optimizer


def parameter_groups(model: nn.Module, optimizer: Optimizer) -> list[dict[str, Any]]:
    """Split trainable parameters into those that decay and those that do not.

    Biases and normalisation scales are the parameters of fewer than two dimensions (He et al. 2018, "Bag of
    tricks", section 3.1). Empty groups are left out.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if optimizer.decay_norm_and_bias or optimizer.weight_decay == 0:
        return [{"params": trainable, "weight_decay": optimizer.weight_decay}]
    groups = [
        {"params": [p for p in trainable if p.ndim > 1], "weight_decay": optimizer.weight_decay},
        {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, optimizer: Optimizer, device: torch.device) -> torch.optim.Optimizer:
    """Build torch's own optimizer, fused on CUDA; on the CPU torch's default, which matches a plain loop's bits."""
    groups = parameter_groups(model, optimizer)
    fused = True if device.type == "cuda" else None
    if optimizer.name == "adamw":
        return torch.optim.AdamW(groups, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, fused=fused)
    return torch.optim.SGD(
        groups, lr=optimizer.lr, momentum=optimizer.momentum, nesterov=optimizer.nesterov, fused=fused
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Give every group the schedule's value."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
