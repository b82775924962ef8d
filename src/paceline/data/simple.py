"""A stream of batches that one function makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from paceline.data.ahead import made_ahead
from paceline.data.batch import Batch, Progress
from paceline.data.nested import Nested
from paceline.data.order import StepGeometry, evaluation_slices
from paceline.data.pipeline import Placement
from paceline.data.prefetch import as_they_are, pinned, to_device
from paceline.data.slices import SampleSlice
from paceline.world import World

Reader = Callable[[SampleSlice, bool], tuple[Nested, Nested] | Batch]
"""Makes inputs and targets of the samples ``slice.ids``, which are numbered from 0 among those for training, or among
those held out; the second argument says which. A batch instead, where some samples may be broken."""


class SimplePipeline:
    """Batches that a function makes, moved to the device.

    Args:
        read: Makes a batch. It must give the same for the same ids and epoch every time, whatever else is among them;
            what it draws is keyed by them (``paceline.data.random_draws``). With threads, several batches are made at
            once.
        evaluation_samples: How many are held out.
        placement: Where batches are to be.
        name: What the samples are called in messages, before their number.
        threads: How many read ahead, for samples that come from a disk or take time to make; 0, for what is in memory,
            makes a batch when it is asked for.
        prefetch: Micro-batches that are begun ahead for each thread.
    """

    def __init__(
        self,
        read: Reader,
        *,
        evaluation_samples: int,
        placement: Placement,
        name: str = "sample",
        threads: int = 0,
        prefetch: int = 2,
    ) -> None:
        self._read = read
        self._evaluation_samples = evaluation_samples
        self._placement = placement
        self._name = name
        self._threads, self._prefetch = threads, prefetch
        self._moving: Callable[[], AbstractContextManager[Any]] = nullcontext

    def start(self, *, training: bool, evaluation: bool) -> None:
        """Nothing: there are no loader processes, and threads begin with the first batch."""

    def load(self, report: Progress) -> None:
        """Nothing: the function has what it needs."""

    def train_batches(self, geometry: StepGeometry, first: int, last: int, world: World) -> Iterator[Batch]:
        """This process's micro-batches of the steps ``first`` to ``last`` (excluded)."""
        return self._batches(geometry.stream(first, last, world), training=True)

    def evaluation_batches(self, batch_size: int, world: World) -> Iterator[Batch]:
        """This process's part of the evaluation samples."""
        return self._batches(evaluation_slices(self._evaluation_samples, batch_size, world), training=False)

    def sample_name(self, sample_id: int, *, training: bool) -> str:
        """The set and the number."""
        return f"{self._name} {sample_id} ({'training' if training else 'held out'})"

    def timed_by(self, moving: Callable[[], AbstractContextManager[Any]]) -> None:
        """Enter what ``moving`` gives where a training step waits for a batch that is being brought to the device."""
        self._moving = moving

    def close(self) -> None:
        """Nothing is open: threads end with their stream."""

    def _batches(self, slices: Iterable[SampleSlice], *, training: bool) -> Iterator[Batch]:
        make = partial(self._batch, training=training)
        batches = made_ahead(make, slices, threads=self._threads, prefetch=self._prefetch)
        return to_device(batches, as_they_are, self._placement, moving=self._moving if training else nullcontext)

    def _batch(self, part: SampleSlice, *, training: bool) -> Batch:
        try:
            read = self._read(part, training)
        except Exception as error:
            of = "training" if training else "held-out"
            error.add_note(f"(while a batch of these {of} samples was made: {', '.join(map(str, part.ids))})")
            raise
        return pinned(read if isinstance(read, Batch) else Batch(*read, part.ids, part), self._placement)
