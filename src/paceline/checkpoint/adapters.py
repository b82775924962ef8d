"""What are the weights of a network with low-rank adapters without them?

Merged into the weights beside which they stand, W + alpha / rank * B A, they cost nothing and need no other library,
and the names are the plain network's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_BASE, _DOWN, _UP = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"
# Beside a layer whose weight is [in, out].
_TRANSPOSED = ".lora_transposed"


def adapter_scale(recipe: Mapping[str, Any]) -> float | None:
    """By how much a stored recipe's adapters count; None if it has none."""
    model = recipe.get("model")
    asked = model.get("adapters") if isinstance(model, Mapping) else None
    rank, alpha = (asked.get("rank"), asked.get("alpha")) if isinstance(asked, Mapping) else (None, None)
    # What is no number is refused where the recipe is validated.
    return alpha / rank if type(rank) is int and rank > 0 and isinstance(alpha, int | float) else None


def without_adapters(state: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Merge adapters into the weights of their layers, linear ones and convolutions.

    Args:
        state: Tensors as a network with adapters has them.
        scale: Factor on what they compute.
    """
    merged = {}
    for name, tensor in state.items():
        if name.endswith((_DOWN, _UP, _TRANSPOSED)):
            continue
        layer, is_base, own = name.rpartition(_BASE)
        down, up = state.get(f"{layer}{_DOWN}"), state.get(f"{layer}{_UP}")
        if not is_base or own != "weight" or down is None or up is None:
            merged[f"{layer}.{own}" if is_base else name] = tensor
            continue
        # A: [rank, in, ...], B: [out, rank] or [out, rank, 1, 1]; together shaped as the weight.
        change = torch.tensordot(up.flatten(1).float(), down.float(), dims=1) * scale
        change = change.T if f"{layer}{_TRANSPOSED}" in state else change
        merged[f"{layer}.weight"] = (tensor.float() + change).to(tensor.dtype)
    return merged
