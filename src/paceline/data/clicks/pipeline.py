"""How do samples of a click data set become the stream of batches that a run trains on?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

from paceline.data.ahead import made_ahead
from paceline.data.batch import Batch, Progress
from paceline.data.clicks.source import ClickSource, HeldRows, held
from paceline.data.order import StepGeometry, evaluation_rounds, evaluation_slices
from paceline.data.pipeline import Placement
from paceline.data.prefetch import as_they_are, pinned, to_device
from paceline.data.slices import SampleSlice
from paceline.world import World


class ClickPipeline:
    """Batches of numbers and categories; satisfies :class:`paceline.data.pipeline.Pipeline`.

    Inputs are ``{"dense": float32 [N, dense features], "categories": int64 [N, categorical features]}``, targets
    float32 [N], 1 for a click. Sets of up to 1 GiB are held in memory; of others, a thread reads one batch ahead.
    """

    def __init__(self, *, train: ClickSource, evaluation: ClickSource, placement: Placement) -> None:
        self._sources = {True: train, False: evaluation}
        self._placement = placement
        self._moving: Callable[[], AbstractContextManager[Any]] = nullcontext

    def start(self, *, training: bool, evaluation: bool) -> None:
        """Nothing to start: there are no loader processes."""

    def load(self, report: Progress) -> None:
        """Bring both splits to memory, where there is room."""
        for training in (True, False):
            count = len(self._source(training=training))
            report(count, count)

    def train_batches(self, geometry: StepGeometry, first: int, last: int, world: World) -> Iterator[Batch]:
        """This process's micro-batches of the steps ``first`` to ``last`` (excluded)."""
        return self._batches(geometry.stream(first, last, world), training=True)

    def evaluation_batches(self, batch_size: int, world: World) -> Iterator[Batch]:
        """This process's part of the evaluation samples."""
        return self._batches(evaluation_slices(len(self._sources[False]), batch_size, world), training=False)

    def evaluation_rounds(self, batch_size: int, world: World) -> int:
        """Most evaluation batches that any process has."""
        return evaluation_rounds(len(self._sources[False]), batch_size, world)

    def sample_name(self, sample_id: int, *, training: bool) -> str:
        """The sample's line, or its set and number."""
        return self._sources[training].name(sample_id)

    def timed_by(self, moving: Callable[[], AbstractContextManager[Any]]) -> None:
        """Enter what ``moving`` gives where a training step waits for a batch that is being brought to the device."""
        self._moving = moving

    def close(self) -> None:
        """Nothing is open."""

    def _batches(self, slices: Iterable[SampleSlice], *, training: bool) -> Iterator[Batch]:
        source = self._source(training=training)
        # Pages of a mapped file may have to come from a disk.
        batches = made_ahead(partial(batch_of, source), slices, threads=0 if isinstance(source, HeldRows) else 1)
        batches = (pinned(batch, self._placement) for batch in batches)
        moving = self._moving if training else nullcontext
        return to_device(batches, as_they_are, self._placement, moving=moving)

    def _source(self, *, training: bool) -> ClickSource:
        self._sources[training] = held(self._sources[training])
        return self._sources[training]


def batch_of(source: ClickSource, piece: SampleSlice) -> Batch:
    """The samples of a slice, in main memory."""
    rows = source.read(piece.ids)
    inputs = {"dense": torch.from_numpy(rows.dense), "categories": torch.from_numpy(rows.categories)}
    return Batch(inputs, torch.from_numpy(rows.labels.astype(np.float32)), piece.ids, piece)
