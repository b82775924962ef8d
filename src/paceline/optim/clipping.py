"""Gradient clipping."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from paceline.recipe.optimizer import Optimizer


class Clipping:
    """Clips gradients as the recipe asks, and measures them.

    Adaptive clipping leaves out the classifier, as its authors do (Brock et al. 2021, section 4.1), where the network
    says which of its modules that is (``get_classifier``, as timm's do).
    """

    def __init__(self, network: nn.Module, optimizer: Optimizer) -> None:
        self._parameters = list(network.parameters())
        self._norm, self._value, self._adaptive = optimizer.clip_norm, optimizer.clip_value, optimizer.clip_adaptive
        head = getattr(network, "get_classifier", lambda: None)()
        left_out = {id(each) for each in head.parameters()} if isinstance(head, nn.Module) else set()
        self._hidden = [each for each in self._parameters if id(each) not in left_out]

    @property
    def uses_norm(self) -> bool:
        """Whether the whole gradient's norm decides what becomes of it."""
        return self._norm is not None

    def __call__(self, *, measure: bool) -> torch.Tensor | None:
        """Clip; the gradient's L2 norm before that, where it was measured, stays on the device."""
        if self._norm is not None:
            return _whole(nn.utils.clip_grad_norm_(self._parameters, self._norm))
        norm = None
        if measure:
            gradients = [each.grad for each in self._parameters if each.grad is not None]
            # A sparse gradient may have a row several times, as often as a batch used it: what counts is their sum.
            dense = [each.coalesce().values() if each.is_sparse else each for each in gradients]
            norm = _whole(nn.utils.get_total_norm(dense))
        if self._value is not None:
            nn.utils.clip_grad_value_(self._parameters, self._value)
        if self._adaptive is not None:
            from timm.utils import agc

            clip: Any = agc.adaptive_clip_grad
            clip(self._hidden, self._adaptive)
        return norm


def _whole(norm: torch.Tensor) -> torch.Tensor:
    """Of gradients that are spread over processes, the norm over all of them: then a collective."""
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
