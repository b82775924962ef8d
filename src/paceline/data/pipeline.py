"""Streams of batches on the device: the pipeline interface, and a pipeline built from a reading function.

Threads may prepare batches ahead. On a GPU, batch *n + 1* is copied, normalised and finished on a side stream during
the computation of *n*; on the CPU the same arithmetic runs synchronously.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, cast

from paceline.data.batch import Batch, Nested, Progress, identity, pinned, to_device
from paceline.data.batch import Placement as Placement  # noqa: PLC0414  # your own code imports it from here
from paceline.data.order import StepGeometry, evaluation_slices
from paceline.data.slices import SampleSlice
from paceline.errors import ModelError
from paceline.host.machine import available_cores
from paceline.host.world import World


class Pipeline(Protocol):
    """Batches on the device, ready for the model, in the order of the plan."""

    def start(self, *, training: bool, evaluation: bool) -> None:
        """Start the loader processes for these streams, if any.

        Called while this process has no other threads, since forked processes would inherit their locks.
        """
        ...

    def load(self, report: Progress) -> None:
        """Load the in-memory data now, and report (samples read, total samples) periodically."""
        ...

    def train_batches(self, geometry: StepGeometry, first: int, last: int, world: World) -> Iterator[Batch]:
        """Yield this process's micro-batches of steps ``first`` to ``last`` (excluded).

        Several may be kept at once, since they do not share memory.
        """
        ...

    def evaluation_batches(self, batch_size: int, world: World) -> Iterator[Batch]:
        """Yield this process's part of the evaluation samples; over all processes, each sample once."""
        ...

    def sample_name(self, sample_id: int, *, training: bool) -> str:
        """Return a display name: the file, or the set and the id."""
        ...

    def close(self) -> None:
        """Stop workers and release memory."""
        ...


class TimedPipeline(Pipeline, Protocol):
    """A pipeline that reports when a training step waits for a transfer to the device."""

    def timed_by(self, moving: Callable[[], AbstractContextManager[Any]]) -> None:
        """Enter the context of ``moving`` during such waits."""
        ...


def as_timed(pipeline: Pipeline) -> TimedPipeline | None:
    """Return the same pipeline if it reports them; custom pipelines need not."""
    return cast("TimedPipeline", pipeline) if hasattr(pipeline, "timed_by") else None


Piece = TypeVar("Piece")
Made = TypeVar("Made")


_MOST_THREADS = 16


def reading_threads(workers: int | str, world: World) -> tuple[int, str]:
    """Return the number of reading threads per process, with the reason, if ``data.workers`` counts threads.

    Args:
        workers: The recipe's value: a number, or ``auto``.
        world: The processes that share this machine's cores.
    """
    if isinstance(workers, int):
        return workers, "as the recipe says"
    cores = available_cores()
    threads = max(1, min(cores // world.local_world_size - 1, _MOST_THREADS))
    return threads, f"threads that read: {cores} cores for {world.local_world_size} process(es), one for training"


def prefetch_map(
    make: Callable[[Piece], Made], pieces: Iterable[Piece], *, threads: int, prefetch: int = 1
) -> Iterator[Made]:
    """Yield ``make(piece)`` for each piece in order, and compute the next ones in advance.

    An error in ``make`` is raised at its piece's turn. ``pieces`` is consumed lazily, by the caller's thread.

    Args:
        make: Function to run in the threads.
        pieces: Its arguments.
        threads: Number of threads; 0 computes each on request.
        prefetch: Pieces to start ahead per thread.
    """
    if not threads:
        for piece in pieces:  # map() would mistake a StopIteration in ``make`` for the end
            yield make(piece)
        return
    coming, waiting = iter(pieces), deque[Future[Made]]()
    with ThreadPoolExecutor(threads, thread_name_prefix="reader") as pool:
        try:
            while True:
                missing = 1 + threads * prefetch - len(waiting)
                waiting.extend(pool.submit(make, each) for each in itertools.islice(coming, missing))
                if not waiting:
                    return
                yield waiting.popleft().result()
        finally:  # before the pool is closed, which waits for everything that is not cancelled
            for each in waiting:
                each.cancel()


Reader = Callable[[SampleSlice, bool], tuple[Nested, Nested] | Batch]
"""Returns inputs and targets of the samples ``slice.ids``, numbered from 0 within the training or held-out set, which
the second argument selects. May return a Batch instead, if some samples are broken."""


class SimplePipeline:
    """Batches from a function, moved to the device.

    Args:
        read: Creates a batch. It must return the same samples for the same ids and epoch every time, whatever the rest
            of the batch; key its random draws by them (``paceline.data.random_draws``). With threads, it is called
            concurrently.
        evaluation_samples: Number of held-out samples.
        placement: Target device and layout of batches.
        name: Name of samples in messages, before their number.
        threads: Number of threads that read ahead, for samples that are read from disk or slow to compute; 0, for
            in-memory data, creates batches on request.
        prefetch: Micro-batches to start ahead per thread.
        normalize: Converts inputs on the device to the network's.
    """

    _sources: Mapping[bool, Any] = MappingProxyType({})

    def __init__(
        self,
        read: Reader,
        *,
        evaluation_samples: int,
        placement: Placement,
        name: str = "sample",
        threads: int = 0,
        prefetch: int = 2,
        normalize: Callable[[Nested], Nested] = identity,
    ) -> None:
        self._read = read
        self._evaluation_samples = evaluation_samples
        self._placement = placement
        self._name = name
        self._threads, self._prefetch = threads, prefetch
        self._normalize = normalize
        self._moving: Callable[[], AbstractContextManager[Any]] = nullcontext

    def start(self, *, training: bool, evaluation: bool) -> None:
        """Do nothing: there are no loader processes, and threads start with the first batch."""

    def load(self, report: Progress) -> None:
        """Do nothing: there is nothing to load."""

    def train_batches(self, geometry: StepGeometry, first: int, last: int, world: World) -> Iterator[Batch]:
        """Yield this process's micro-batches of steps ``first`` to ``last`` (excluded)."""
        return self._batches(geometry.stream(first, last, world), training=True)

    def evaluation_batches(self, batch_size: int, world: World) -> Iterator[Batch]:
        """Yield this process's part of the evaluation samples."""
        return self._batches(evaluation_slices(self._evaluation_samples, batch_size, world), training=False)

    def sample_name(self, sample_id: int, *, training: bool) -> str:
        """Return the sample's name in its source, if there are ``_sources``, or else the set and the number."""
        if training in self._sources:
            return str(self._sources[training].path(sample_id))
        return f"{self._name} {sample_id} ({'training' if training else 'held out'})"

    def timed_by(self, moving: Callable[[], AbstractContextManager[Any]]) -> None:
        """Enter the context of ``moving`` when a training step waits for a transfer to the device."""
        self._moving = moving

    def close(self) -> None:
        """Do nothing: threads end with their stream."""

    def _batches(self, slices: Iterable[SampleSlice], *, training: bool) -> Iterator[Batch]:
        make = partial(self._batch, training=training)
        batches = prefetch_map(make, slices, threads=self._threads, prefetch=self._prefetch)
        return to_device(batches, self._normalize, self._placement, moving=self._moving if training else nullcontext)

    def _batch(self, part: SampleSlice, *, training: bool) -> Batch:
        try:
            read = self._read(part, training)
        except Exception as error:
            of = "training" if training else "held-out"
            error.add_note(f"(while a batch of these {of} samples was made: {', '.join(map(str, part.ids))})")
            raise
        # Here already, so that the threads that read also copy.
        return pinned(_as_batch(read, part), self._placement.device)


def _as_batch(read: Any, part: SampleSlice) -> Batch:
    """Return what your reader returned, as a batch.

    Raises:
        ModelError: If it is neither a batch nor inputs and targets.
    """
    if isinstance(read, Batch):
        return read
    is_several = isinstance(read, tuple | list)
    if not is_several or len(read) != 2:
        found = f"{len(read)} parts" if is_several else f"a {type(read).__name__}"
        raise ModelError(f"the pipeline's read returned {found}, but must return inputs and targets.")
    inputs, targets = read
    return Batch(inputs, targets, part.ids, part)
