"""How do samples of a click data set become the stream of batches that a run trains on?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from paceline.data.batch import Batch, Progress
from paceline.data.clicks.source import ClickSource, HeldRows, held
from paceline.data.nested import Nested
from paceline.data.order import StepGeometry, evaluation_rounds, evaluation_slices
from paceline.data.pipeline import Placement
from paceline.data.prefetch import to_device
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
        batches: Iterator[Batch] = (batch_of(source, piece) for piece in slices)
        if not isinstance(source, HeldRows):
            batches = _read_ahead(batches)
        if self._placement.device.type == "cuda":
            # From page-locked memory, or the copy would wait for the device.
            batches = (batch.pin_memory() for batch in batches)
        moving = self._moving if training else nullcontext
        return to_device(batches, _as_they_are, self._placement, moving=moving)

    def _source(self, *, training: bool) -> ClickSource:
        self._sources[training] = held(self._sources[training])
        return self._sources[training]


def batch_of(source: ClickSource, piece: SampleSlice) -> Batch:
    """The samples of a slice, in main memory."""
    rows = source.read(piece.ids)
    inputs = {"dense": torch.from_numpy(rows.dense), "categories": torch.from_numpy(rows.categories)}
    return Batch(inputs, torch.from_numpy(rows.labels.astype(np.float32)), piece.ids, piece)


def _as_they_are(inputs: Nested) -> Nested:
    return inputs


def _read_ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Have the next batch read while one is computed on: pages of a mapped file may have to come from a disk."""
    with ThreadPoolExecutor(1, thread_name_prefix="click rows") as pool:
        ready = pool.submit(next, batches, None)
        while (batch := ready.result()) is not None:
            ready = pool.submit(next, batches, None)
            yield batch
