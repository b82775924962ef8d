"""How do an image dataset, a back-end and the device become the stream of batches that a run trains on?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from paceline.data.backends.dali.backend import DaliBackend
from paceline.data.backends.pytorch import PytorchBackend
from paceline.data.batch import Backend, Batch, Progress
from paceline.data.image.mixing import Mixing
from paceline.data.image.source import SampleSource
from paceline.data.order import StepGeometry, evaluation_rounds, evaluation_slices
from paceline.data.pipeline import Placement
from paceline.data.prefetch import Normalize, to_device
from paceline.data.slices import SampleShapes
from paceline.world import World


@dataclass(frozen=True, kw_only=True)
class OpenedSplit:
    """One split of a dataset, and how to open a back-end for it.

    Attributes:
        source: Its images.
        open: Opens the back-end; may report how far it is.
        shapes: At which shape each image is shown, where that is not the same for all.
    """

    source: SampleSource
    open: Callable[[Progress | None], Backend]
    shapes: SampleShapes | None = None


class ImagePipeline:
    """Training and evaluation batches of an image dataset.

    Back-ends with loader processes open in :meth:`start`, others when they are first needed: those that decode a
    whole set would do it in vain for a run that turns out to be complete. What :meth:`start` was not asked for is not
    loaded either."""

    def __init__(
        self,
        *,
        train: OpenedSplit,
        evaluation: OpenedSplit,
        normalize: Normalize,
        placement: Placement,
        has_workers: bool,
        mixing: Mixing | None = None,
    ) -> None:
        self._splits = {True: train, False: evaluation}
        self._opened: dict[bool, Backend] = {}
        self._wanted = {True: True, False: True}
        self._normalize = normalize
        self._placement = placement
        self._has_workers = has_workers
        self._moving: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._mixing = mixing if mixing is not None and mixing.is_asked_for else None

    def start(self, *, training: bool, evaluation: bool) -> None:
        """Start the loader processes that these streams will need, if any."""
        self._wanted = {True: training, False: evaluation}
        for split, is_wanted in self._wanted.items():
            if is_wanted and self._has_workers:
                self._backend(training=split)

    def load(self, report: Progress) -> None:
        """Read now what is held in memory, and report how far it is."""
        for split, is_wanted in self._wanted.items():
            if is_wanted and len(self._splits[split].source):
                self._backend(report, training=split)

    def train_batches(self, geometry: StepGeometry, first: int, last: int, world: World) -> Iterator[Batch]:
        """This process's micro-batches of the steps ``first`` to ``last`` (excluded)."""
        raw = self._backend(training=True).batches(geometry.stream(first, last, world))
        return to_device(raw, self._normalize, self._placement, self._mixing, self._moving)

    def timed_by(self, moving: Callable[[], AbstractContextManager[Any]]) -> None:
        """Enter what ``moving`` gives where a training step waits for a batch that is being brought to the device."""
        self._moving = moving

    def evaluation_batches(self, batch_size: int, world: World) -> Iterator[Batch]:
        """This process's part of the evaluation samples."""
        split = self._splits[False]
        slices = evaluation_slices(len(split.source), batch_size, world, split.shapes)
        return to_device(self._backend(training=False).batches(slices), self._normalize, self._placement)

    def evaluation_rounds(self, batch_size: int, world: World) -> int:
        """Most evaluation batches that any process has."""
        split = self._splits[False]
        return evaluation_rounds(len(split.source), batch_size, world, split.shapes)

    def sample_name(self, sample_id: int, *, training: bool) -> str:
        """The sample's file, or its set and number."""
        return self._splits[training].source.path(sample_id)

    def reading(self, *, training: bool) -> str:
        """Which sample is being read, or was read last; empty where nothing is read while training goes on."""
        backend = self._opened.get(training)
        return backend.reading() if isinstance(backend, PytorchBackend | DaliBackend) else ""

    def close(self) -> None:
        """Stop workers."""
        for backend in self._opened.values():
            backend.close()
        self._opened = {}

    def _backend(self, progress: Progress | None = None, *, training: bool) -> Backend:
        if training not in self._opened:
            self._opened[training] = self._splits[training].open(progress)
        return self._opened[training]
