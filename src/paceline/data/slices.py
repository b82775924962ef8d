"""The samples of one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SampleIds = NDArray[np.int64]
SampleWeights = NDArray[np.int64]
"""Weight of each sample, [N]."""
SampleShapes = NDArray[np.int64]
"""Height and width of each sample, [N, 2]."""


@dataclass(frozen=True, kw_only=True)
class SampleSlice:
    """The samples of one micro-batch on one rank; a pure function of (seed, step) and the world.

    Attributes:
        step: Optimizer step this micro-batch belongs to, counted from 0.
        epoch: Epoch of the samples; keys their augmentation.
        logical_rank: Position of the micro-batch within the global batch; keys dropout.
        ids: Sample ids, int64 [N].
        is_last: True on the rank's last micro-batch of the step: gradients are reduced after it.
        step_weight: Total weight of the global step in the loss, over all ranks and micro-batches: its number of
            samples, or the sum of their weights, such as tokens.
        logical_ranks: Micro-batch slots in the step, over all ranks.
        shape: Height and width of these samples, if not the same for all.
        phantom: True if a rank has no samples in an epoch's last step and processes one with weight zero to match the
            other ranks' collectives.
        weight: Weights of these samples; None if all are equal.
        step_samples: Number of samples in the global step, if they have weights.
        mean_class_weight: Mean class weight of the whole global step's samples; None without class weights. Each
            micro-batch's weighted loss is divided by it, so that the step's loss is the weighted mean.
        keys: For samples drawn with replacement, a number per draw, int64 [N]; None otherwise.
        first: Position of the first sample in the epoch's order, if the ids are consecutive there; None otherwise.
    """

    step: int
    epoch: int
    logical_rank: int
    ids: SampleIds
    is_last: bool = True
    step_weight: int
    logical_ranks: int = 1
    shape: tuple[int, int] | None = None
    phantom: bool = False
    weight: int | None = None
    step_samples: int | None = None
    mean_class_weight: float | None = None
    keys: SampleIds | None = None
    first: int | None = None

    @property
    def variation_keys(self) -> SampleIds:
        """Return the keys of the samples' augmentation, int64 [N]: their ids, or if ids repeat, a number per draw."""
        return self.ids if self.keys is None else self.keys


def micro_batch(ids: SampleIds) -> SampleSlice:
    """Return a micro-batch of these samples, for trials."""
    return SampleSlice(step=0, epoch=0, logical_rank=0, ids=ids, step_weight=len(ids))


def first_samples(count: int) -> SampleSlice:
    """Return a micro-batch of the first samples."""
    return micro_batch(np.arange(count))


def evenly_spaced(samples: int, count: int) -> SampleIds:
    """Return the ids of at most ``count`` samples of a data set, evenly spaced and including the last one."""
    return np.linspace(0, max(0, samples - 1), min(count, samples)).astype(np.int64)


def even_bounds(size: int, parts: int) -> tuple[int, ...]:
    """Return the bounds of parts of ``size`` samples, [parts + 1]: as equal as possible, larger ones first."""
    part, larger = divmod(size, parts)
    return tuple(rank * part + min(rank, larger) for rank in range(parts + 1))
