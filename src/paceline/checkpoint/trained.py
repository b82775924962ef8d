"""Weights that are to answer: complete, of finite numbers, and in their network."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.components import check_inventory, fitted
from paceline.checkpoint.weights import SavedWeights
from paceline.errors import NotFiniteError
from paceline.escaping import one_line

_LOG = logging.getLogger("paceline.weights")


def load_trained(network: nn.Module, saved: SavedWeights) -> None:
    """Put saved weights into their network, and log what was changed for that (by default to standard error).

    Raises:
        CheckpointError: If they do not fit it.
        NotFiniteError: As :func:`check_finite`.
    """
    own = network.state_dict()
    state, notices = fitted(own, saved.plain)
    check_inventory(own, state, where=str(saved.path))
    check_tensors({name: state[name] for name in own}, str(saved.path))
    if "data" in saved.metadata:
        check_scale(saved.described("data"), str(saved.path))
    network.load_state_dict(state)
    for notice in notices:
        _LOG.warning("%s", one_line(f"note: of {saved.path}, {notice}"))


def check_finite(saved: SavedWeights) -> None:
    """Refuse weights, or means and standard deviations of their data, that are not finite numbers.

    Raises:
        NotFiniteError: Naming the first by name, as a file has no order.
    """
    check_tensors(dict(sorted(saved.plain.items())), str(saved.path))
    if "data" in saved.metadata:
        check_scale(saved.described("data"), str(saved.path))


def check_tensors(state: Mapping[str, Tensor], where: str) -> None:
    """Refuse tensors with values that are not finite numbers; raises NotFiniteError."""
    spoiled = [name for name, tensor in state.items() if _is_spoiled(tensor)]
    if spoiled:
        raise NotFiniteError(
            f"{where}: {spoiled[0]} holds values that are not finite ({len(spoiled)} of {len(state)} tensors do); "
            "use an earlier checkpoint or another file."
        )


def check_scale(data: Mapping[str, Any], where: str) -> None:
    """Refuse a description whose images cannot be normalized; raises NotFiniteError."""
    for key in ("mean", "std"):
        for value in data.get(key) or ():
            if not math.isfinite(value) or (key == "std" and value <= 0):
                rule = "must be finite" if key == "mean" else "must be finite and above 0"
                raise NotFiniteError(f"{where}: {key} {list(data[key])} of its images: every number {rule}.")


def _is_spoiled(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    values = tensor.float() if tensor.element_size() == 1 else tensor  # isfinite does not know float8
    if bool(values.isfinite().all()):
        return False
    # An attention mask of zeros and -inf, which many networks keep as a buffer, is meant so.
    zeros = values == 0
    return tensor.ndim < 2 or not (bool(zeros.any()) and bool((zeros | (values == -torch.inf)).all()))
