"""What do the numbers look like that the network is given: their mean and spread over a whole evaluation?

A wrong mean or standard deviation of the images is seen here at once, where the loss may take long to tell: networks
that normalise inside hardly mind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain

import torch

from paceline.data.batch import Nested, tensors_in
from paceline.metrics.accumulator import Rows

# The last bits are those of how the samples were shared out.
_DIGITS = 6


class InputStatistics:
    """Counts and sums of all floating-point numbers of the batches, kept on the device; tokens are no such numbers."""

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._sums: list[torch.Tensor] = []

    def add(self, inputs: Nested) -> None:
        """Take a batch's inputs. No host-device synchronisation."""
        for tensor in tensors_in(inputs):
            if tensor.is_floating_point() and tensor.layout is torch.strided and tensor.numel():
                self._counts.append(tensor.numel())
                self._sums.append(_sums(tensor))

    def rows(self) -> Rows:
        """Count, sum and sum of squares of each tensor; waits for the device."""
        sums: dict[int, list[float]] = {}
        # At once for each device: every answer from one is waited for.
        for device in {each.device for each in self._sums}:
            places = [place for place, each in enumerate(self._sums) if each.device == device]
            answers = torch.stack([self._sums[place] for place in places]).tolist()
            sums |= dict(zip(places, answers, strict=True))
        return [(count, *sums[place]) for place, count in enumerate(self._counts)]


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """Sum and sum of squares, of each sample in fast single precision, and over samples in double where there is it.

    So they hardly depend on which samples are in a batch.
    """
    samples = (tensor.unsqueeze(-1) if tensor.ndim < 2 else tensor).to(torch.float32)
    rest = tuple(range(1, samples.ndim)) or (0,)
    totals = samples.sum(dim=rest)
    lengths = torch.linalg.vector_norm(samples, dim=rest)
    precise = torch.float32 if tensor.device.type == "mps" else torch.float64
    return torch.stack((totals.to(precise).sum(), lengths.to(precise).square().sum()))


def mean_and_spread(parts: Iterable[Rows]) -> dict[str, float]:
    """``input_mean`` and ``input_std`` of what all processes took together, each number once.

    Nothing is said where there are none, or where one is infinite or no number.
    """
    rows = list(chain.from_iterable(parts))
    if not rows or not all(map(math.isfinite, chain.from_iterable(rows))):
        return {}
    count, total, squares = (math.fsum(column) for column in zip(*rows, strict=True))
    mean = total / count
    spread = math.sqrt(max(0.0, squares / count - mean**2))
    return {"input_mean": round(mean, _DIGITS), "input_std": round(spread, _DIGITS)}
