"""What is asked of a back-end, and what it gives back: the slice of samples and the batch made from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

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
        inputs: uint8 [N, C, H, W] from a back-end; normalised float after the prefetcher.
        targets: Class indices, int64 [N]; of mixed samples their probabilities, float [N, classes].
        ids: Ids of the samples in the batch, int64 [N]: the slice's without the broken ones.
        slice: What was asked for.
        broken: Samples of the slice that could not be read.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    ids: SampleIds
    slice: SampleSlice
    broken: tuple[BrokenSample, ...] = field(default=())

    @property
    def weight(self) -> int:
        """Samples that count towards the loss."""
        return 0 if self.slice.phantom else len(self.ids)

    def pin_memory(self) -> Batch:
        """Move the tensors to page-locked memory (called by torch's DataLoader)."""
        return replace(self, inputs=self.inputs.pin_memory(), targets=self.targets.pin_memory())


class Backend(Protocol):
    """Turns slices into batches, one for each, in order. One object serves one split with its transform."""

    def batches(self, slices: Iterable[SampleSlice]) -> Iterator[Batch]:
        """Yield one uint8 batch per slice; consumes ``slices`` lazily."""
        ...

    def close(self) -> None:
        """Stop workers and release memory."""
        ...
