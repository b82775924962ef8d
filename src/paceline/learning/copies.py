"""Whether held-out samples are trained on: inputs of a few steps are compared with those of an evaluation."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Prints = NDArray[np.int64]
"""Fingerprints of samples [N]; equal for equal inputs."""

NO_PRINTS: Prints = np.zeros(0, np.int64)

_VALUES = 256
_FEWEST_VALUES = 8
_MOST = 1_000_000
_ODD = -7046029254386353131  # 2**64 divided by the golden ratio, as a signed number


def fingerprints(tensors: Iterable[Tensor]) -> Tensor | None:
    """Return fingerprints of a batch's samples, int64 [N], without waiting for the device; None for few values.

    Equal inputs have equal fingerprints: up to 256 values of each tensor stand for all. Zeros at the end of a sample's
    token ids do not count.
    """
    total, values = None, 0
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.ndim < 1 or tensor.is_complex():
            return None
        mixed, count = _mixed(tensor.detach())
        if total is not None and len(total) != len(mixed):
            return None
        total, values = mixed if total is None else total * 31 + mixed, values + count
    return total if values >= _FEWEST_VALUES else None


def _mixed(tensor: Tensor) -> tuple[Tensor, int]:
    is_float = tensor.is_floating_point()
    if tensor.ndim == 2 and not is_float:
        rows = tensor[:, :_VALUES]  # of a text, whose length depends on the batch
    else:
        most = int(_VALUES ** (1 / max(tensor.ndim - 1, 1)))
        rows = tensor[(slice(None), *(slice(None, None, -(-length // most) or 1) for length in tensor.shape[1:]))]
    rows = rows.flatten(1) if rows.ndim > 1 else rows[:, None]
    bits = rows.float().view(torch.int32).long() if is_float else rows.long()
    factors = torch.arange(1, 2 * bits.shape[1], 2, device=tensor.device) * _ODD
    mixed = bits * factors
    return (mixed ^ (mixed >> 29)).sum(dim=1), bits.shape[1]


class FingerprintCollector:
    """Collects the fingerprints of batches; of no more than a million samples."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []
        self._count = 0

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Add a batch's samples, without waiting for the device."""
        found = fingerprints(tensors) if self._count < _MOST else None
        if found is not None:
            self._parts.append(found)
            self._count += len(found)

    def prints(self) -> Prints:
        """Return all fingerprints; waits for the device."""
        self._parts = [torch.cat([each.cpu() for each in self._parts])] if self._parts else []
        return self._parts[0].numpy() if self._parts else NO_PRINTS


def count_copies(trained: Prints, held_out: Prints) -> dict[str, int]:
    """Return how many trained samples were compared, and how many are held out too; empty without samples."""
    if not len(trained) or not len(held_out):
        return {}
    distinct = np.unique(trained)
    return {"compared": len(distinct), "equal": int(np.isin(distinct, held_out).sum())}
