"""Linear layers in fp8 by torchao; names and weights stay the same."""

from __future__ import annotations

from typing import Any

from torch import nn

from paceline.errors import ModelError

# Sizes must be multiples of this for fp8 matrix units.
_MULTIPLE = 16


def fp8_layers(network: nn.Module, *, name: str) -> tuple[str, ...]:
    """Return the names of the linear layers that support fp8: both sizes are multiples of 16.

    Raises:
        ModelError: If there is none.
    """
    found = tuple(path for path, module in network.named_modules() if _fits(module, path))
    if not found:
        raise ModelError(
            f"train.precision=fp8 has no effect on {name}: none of its linear layers has sizes that are multiples of "
            f"{_MULTIPLE}; use bf16."
        )
    return found


def convert_to_fp8(network: nn.Module) -> nn.Module:
    """Convert those layers to fp8 computation; parameters and keys stay unchanged."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # Padded, since the weight gradient sums over samples, and an epoch's last batch may have any size.
    config = Float8LinearConfig(pad_inner_dim=True)
    converted: nn.Module = convert_to_float8_training(network, config=config, module_filter_fn=_fits)
    return converted


def _fits(module: Any, _: str) -> bool:
    return (
        isinstance(module, nn.Linear) and module.in_features % _MULTIPLE == 0 and module.out_features % _MULTIPLE == 0
    )
