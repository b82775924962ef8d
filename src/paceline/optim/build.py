"""Which update rule moves which parameters?"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from paceline.recipe.training import Optimizer


def parameter_groups(model: nn.Module, optimizer: Optimizer) -> list[dict[str, Any]]:
    """Split trainable parameters into those that decay and those that do not.

    Biases and normalisation scales are the parameters of fewer than two dimensions (He et al. 2018, "Bag of
    tricks", section 3.1); they do not decay, nor what the network itself exempts, as timm's do (position embeddings,
    class tokens). Empty groups are left out.
    """
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if optimizer.decay_norm_and_bias or optimizer.weight_decay == 0:
        return [{"params": list(trainable.values()), "weight_decay": optimizer.weight_decay}]
    patterns = list(exempt_from_decay(model))
    free = {
        name
        for name, parameter in trainable.items()
        if parameter.ndim <= 1 or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }
    groups = [
        {"params": [p for name, p in trainable.items() if name not in free], "weight_decay": optimizer.weight_decay},
        {"params": [p for name, p in trainable.items() if name in free], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def exempt_from_decay(model: nn.Module, prefix: str = "") -> Iterator[str]:
    """Names, or shell patterns of names, that ``no_weight_decay()`` of the network gives.

    A network around another one need not repeat what that one says: the outermost answer of each branch counts.
    """
    names = getattr(model, "no_weight_decay", None)
    if callable(names):
        yield from (prefix + name for name in names())
        return
    for child, module in model.named_children():
        yield from exempt_from_decay(module, f"{prefix}{child}.")


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
