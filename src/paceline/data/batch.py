"""What is asked of a back-end, and what it gives back: the slice of samples and the batch made from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from paceline.data.nested import Nested, mapped
from paceline.data.slices import SampleIds, SampleSlice

Progress = Callable[[int, int], None]
"""Called now and then with (samples read, samples in all)."""


@dataclass(frozen=True)
class BrokenSample:
    """A sample that could not be read: left out of its batch, and reported."""

    id: int
    path: str
    reason: str


@dataclass(frozen=True)
class Batch:
    """One micro-batch.

    Attributes:
        inputs: Tensors, N samples each, nested as the task likes. Of images uint8 [N, C, H, W] from a back-end, and
            normalised float after the prefetcher.
        targets: Likewise. Of images class indices, int64 [N]; of mixed samples probabilities, float [N, classes].
        ids: Ids of the samples in the batch, int64 [N]: the slice's without the broken ones.
        slice: What was asked for.
        broken: Samples of the slice that could not be read.
    """

    inputs: Nested
    targets: Nested
    ids: SampleIds
    slice: SampleSlice
    broken: tuple[BrokenSample, ...] = field(default=())

    @property
    def weight(self) -> int:
        """What the batch's mean loss counts for: its samples, or where they weigh something, what they weigh."""
        if self.slice.phantom:
            return 0
        return len(self.ids) if self.slice.weight is None else self.slice.weight

    def pin_memory(self) -> Batch:
        """Move the tensors to page-locked memory (called by torch's DataLoader); those that cannot be are left."""
        inputs, targets = (mapped(_pinned, each) for each in (self.inputs, self.targets))
        return replace(self, inputs=inputs, targets=targets)


def _pinned(tensor: Tensor) -> Tensor:
    can_be = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return tensor.pin_memory() if can_be else tensor


class Backend(Protocol):
    """Turns slices into batches, one for each, in order. One object serves one split with its transform."""

    def batches(self, slices: Iterable[SampleSlice]) -> Iterator[Batch]:
        """Yield one uint8 batch per slice; consumes ``slices`` lazily."""
        ...

    def close(self) -> None:
        """Stop workers and release memory."""
        ...
