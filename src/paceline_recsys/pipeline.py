"""Batches of clicks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from paceline.data.batch import Batch, Progress
from paceline.data.pipeline import Placement, SimplePipeline
from paceline.data.slices import SampleSlice
from paceline_recsys.dataset import ClickSource, InMemoryRows, hold_in_memory


class ClickPipeline(SimplePipeline):
    """Batches of numeric features and categories.

    Inputs are ``{"dense": float32 [N, dense features], "categories": int64 [N, categorical features]}``, targets
    float32 [N], 1 for a click. Sets of up to 1 GiB are held in memory; for larger ones, a thread reads one batch ahead.
    """

    def __init__(self, *, train: ClickSource, evaluation: ClickSource, placement: Placement) -> None:
        self._sources: dict[bool, ClickSource] = {True: train, False: evaluation}
        super().__init__(self._rows, evaluation_samples=len(evaluation), placement=placement, prefetch=1)

    def load(self, report: Progress) -> None:
        """Load both splits into memory, if they fit."""
        for training, source in self._sources.items():
            self._sources[training] = hold_in_memory(source)
            report(len(source), len(source))

    def _batches(self, slices: Iterable[SampleSlice], *, training: bool) -> Iterator[Batch]:
        self._sources[training] = source = hold_in_memory(self._sources[training])
        # Pages of a mapped file may have to be read from disk.
        self._threads = 0 if isinstance(source, InMemoryRows) else 1
        return super()._batches(slices, training=training)

    def _rows(self, part: SampleSlice, training: bool) -> tuple[dict[str, Tensor], Tensor]:
        rows = self._sources[training].read(part.ids)
        inputs = {"dense": torch.from_numpy(rows.dense), "categories": torch.from_numpy(rows.categories)}
        return inputs, torch.from_numpy(rows.labels.astype(np.float32))
