"""The samples that one micro-batch asks for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SampleIds = NDArray[np.int64]
SampleWeights = NDArray[np.int64]
"""What each sample counts for, [N]."""
SampleShapes = NDArray[np.int64]
"""Height and width for each sample, [N, 2]."""


@dataclass(frozen=True, kw_only=True)
class SampleSlice:
    """The samples of one micro-batch on one rank; a pure function of (seed, step) and the world.

    Attributes:
        step: Optimizer step this micro-batch belongs to, counted from 0.
        epoch: Epoch the samples are drawn in; keys their augmentation.
        logical_rank: Position of the micro-batch within the global batch; keys dropout.
        ids: Sample ids, int64 [N].
        is_last: True on the rank's last micro-batch of the step: gradients are reduced after it.
        step_weight: What the whole global step weighs in the loss, over all ranks and micro-batches: its samples, or
            where they weigh something, tokens say, the sum of that.
        logical_ranks: Slots for micro-batches in the step, over all ranks.
        shape: Height and width at which these samples are shown, where that is not the same for all.
        phantom: True where a rank has no samples in an epoch's last step and forwards one with weight
            zero, only so that its collectives match the other ranks'.
        weight: What these samples weigh; None where each counts once.
        step_samples: Samples in the whole global step, where they weigh something.
        mean_class_weight: Mean class weight of the whole global step's samples; None without class weights. Each
            micro-batch's weighted loss is divided by it, so that the step's loss is the weighted mean.
        keys: Of samples that are drawn with replacement, a number for each draw, int64 [N]; None otherwise.
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

    @property
    def variation_keys(self) -> SampleIds:
        """What keys the samples' augmentation, int64 [N]: their ids, or where ids repeat, a number for each draw."""
        return self.ids if self.keys is None else self.keys
