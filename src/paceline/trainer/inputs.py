"""What do the numbers look like that the network is given: their mean and spread over a whole evaluation?

A wrong mean or standard deviation of the images is seen here at once, where the loss may take long to tell: networks
that normalise inside hardly mind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain

import torch

from paceline.data.nested import Nested, tensors_in
from paceline.metrics.accumulator import Rows


class InputStatistics:
    """Counts and sums of all floating-point numbers of the batches, kept on the device; tokens are no such numbers."""

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._sums: list[torch.Tensor] = []

    def add(self, inputs: Nested) -> None:
        """Take a batch's inputs. No host-device synchronisation."""
        for tensor in tensors_in(inputs):
            if tensor.is_floating_point() and tensor.numel():
                total = tensor.sum(dtype=torch.float32)
                length = torch.linalg.vector_norm(tensor, dtype=torch.float32)
                self._counts.append(tensor.numel())
                self._sums.append(torch.stack((total, length)))

    def rows(self) -> Rows:
        """Count, sum and sum of squares of each tensor; waits for the device."""
        if not self._sums:
            return []
        sums = torch.stack(self._sums).tolist()
        return [(count, total, length**2) for count, (total, length) in zip(self._counts, sums, strict=True)]


def mean_and_spread(parts: Iterable[Rows]) -> dict[str, float]:
    """``input_mean`` and ``input_std`` of what all processes took together, each number once; nothing without one."""
    rows = list(chain.from_iterable(parts))
    if not rows:
        return {}
    count, total, squares = (math.fsum(column) for column in zip(*rows, strict=True))
    mean = total / count
    return {"input_mean": mean, "input_std": math.sqrt(max(0.0, squares / count - mean**2))}
