"""The moving average of the weights: a second, named set of weights in addition to the trained ones."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


class ExponentialMovingAverage:
    """Exponential moving average of a model's parameters and floating-point buffers, updated once per optimizer step.

    The decay at update *t* (from 0) is ``min(decay, (1 + t) / (10 + t))``, TensorFlow's ``num_updates`` rule, so that
    the initial weights do not dominate short runs. BatchNorm statistics are averaged like weights;
    integer buffers are copied.

    Attributes:
        module: A copy of the model that holds the averaged weights, in evaluation mode, without gradients.
        decay: The asymptotic decay, in [0, 1).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.module = copy.deepcopy(model).eval().requires_grad_(requires_grad=False)
        self.decay = decay
        self._source = model

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average towards the model's weights after the optimizer step numbered ``step`` (from 0)."""
        weight = 1.0 - min(self.decay, (1 + step) / (10 + step))
        averaged, current = _floating(self.module), _floating(self._source)
        torch._foreach_lerp_(averaged, current, weight)
        for mean, value in zip(_others(self.module), _others(self._source), strict=True):
            # Keep -inf in masks: averaging it with itself would give NaN.
            is_average = mean.is_floating_point()
            mean.copy_(torch.where(mean == value, mean, torch.lerp(mean, value, weight)) if is_average else value)


def _floating(module: nn.Module) -> list[torch.Tensor]:
    parameters: list[Any] = list(module.parameters())
    if parameters and hasattr(parameters[0], "to_local"):
        # Either all are sharded or none; the average is sharded alike.
        parameters = [each.to_local() for each in parameters]
    statistics = [each for name, each in module.named_buffers() if _is_statistic(name)]
    return [each.detach() for each in (*parameters, *statistics) if each.is_floating_point()]


def _others(module: nn.Module) -> list[torch.Tensor]:
    """Return integer buffers, and those that may permanently hold infinity."""
    return [each for name, each in module.named_buffers() if not (each.is_floating_point() and _is_statistic(name))]


def _is_statistic(name: str) -> bool:
    return name.rpartition(".")[2].startswith("running_")
