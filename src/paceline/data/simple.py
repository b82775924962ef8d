"""How does a task of one's own become a stream of batches with one function?"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from paceline.data.batch import Batch, Progress
from paceline.data.nested import Nested, mapped
from paceline.data.order import StepGeometry, evaluation_slices
from paceline.data.pipeline import Placement
from paceline.data.slices import SampleSlice
from paceline.world import World

Reader = Callable[[SampleSlice, bool], tuple[Nested, Nested]]
"""Makes inputs and targets of the samples ``slice.ids``; the second argument says whether they are for training."""


class SimplePipeline:
    """Batches that a function makes when they are asked for, moved to the device.

    There are no loader processes: it is for samples that are in memory, or are read in no time.

    Args:
        read: Makes a batch. It must give the same for the same ids and epoch every time, whatever else is among them;
            what it draws is keyed by them (``paceline.data.random_draws``).
        evaluation_samples: How many are held out.
        placement: Where batches are to be.
        name: What the samples are called in messages, before their number.
    """

    def __init__(self, read: Reader, *, evaluation_samples: int, placement: Placement, name: str = "sample") -> None:
        self._read = read
        self._evaluation_samples = evaluation_samples
        self._device = placement.device
        self._name = name

    def start(self, *, training: bool, evaluation: bool) -> None:
        """Nothing: there are no loader processes."""

    def load(self, report: Progress) -> None:
        """Nothing: batches are made when they are asked for."""

    def train_batches(self, geometry: StepGeometry, first: int, last: int, world: World) -> Iterator[Batch]:
        """This process's micro-batches of the steps ``first`` to ``last`` (excluded)."""
        return (self._batch(part, training=True) for part in geometry.stream(first, last, world))

    def evaluation_batches(self, batch_size: int, world: World) -> Iterator[Batch]:
        """This process's part of the evaluation samples."""
        slices = evaluation_slices(self._evaluation_samples, batch_size, world)
        return (self._batch(part, training=False) for part in slices)

    def sample_name(self, sample_id: int, *, training: bool) -> str:
        """The set and the number."""
        return f"{self._name} {sample_id} ({'training' if training else 'held out'})"

    def close(self) -> None:
        """Nothing is open."""

    def _batch(self, part: SampleSlice, *, training: bool) -> Batch:
        made = self._read(part, training)
        inputs, targets = (mapped(lambda each: each.to(self._device, non_blocking=True), nested) for nested in made)
        return Batch(inputs, targets, part.ids, part)
