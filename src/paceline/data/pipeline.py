"""What stream of batches does the trainer see, whatever the data is made of?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from paceline.data.batch import Batch, Progress
from paceline.data.order import StepGeometry
from paceline.world import World


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where and how batches end up.

    Attributes:
        device: Where the model lives.
        channels_last: Whether images come with the channel as the fastest axis.
    """

    device: torch.device
    channels_last: bool = False


class Pipeline(Protocol):
    """Batches on the device, ready for the model, in the order of the plan."""

    def start(self, *, training: bool, evaluation: bool) -> None:
        """Start the loader processes that these streams will need, if any.

        Called while this process has no other threads: a process forked beside them inherits their locks.
        """
        ...

    def load(self, report: Progress) -> None:
        """Read now what is held in memory, and report (samples read, samples in all) now and then."""
        ...

    def train_batches(self, geometry: StepGeometry, first: int, last: int, world: World) -> Iterator[Batch]:
        """This process's micro-batches of the steps ``first`` to ``last`` (excluded)."""
        ...

    def evaluation_batches(self, batch_size: int, world: World) -> Iterator[Batch]:
        """This process's part of the evaluation samples; over all processes, each sample once."""
        ...

    def sample_name(self, sample_id: int, *, training: bool) -> str:
        """A name for people: the file, or the set and the id."""
        ...

    def close(self) -> None:
        """Stop workers and release memory."""
        ...


class TimedPipeline(Pipeline, Protocol):
    """One that tells when a training step waits for a batch that is being brought to the device."""

    def timed_by(self, moving: Callable[[], AbstractContextManager[Any]]) -> None:
        """Enter what ``moving`` gives where that is so."""
        ...


def as_timed(pipeline: Pipeline) -> TimedPipeline | None:
    """The same pipeline, if it tells; those of the user's own need not."""
    return cast("TimedPipeline", pipeline) if hasattr(pipeline, "timed_by") else None
