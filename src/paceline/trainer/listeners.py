"""What follows a run without changing it: the first batch for the report, the forecast, the gradient noise.

``build_run`` fills one list; the loop, the step and the records know only what is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

from paceline.data.batch import Batch

_NOTHING = nullcontext()


class Listener:
    """Follows a run; changes no weight, buffer, random state or batch. Each method does nothing unless overridden."""

    @property
    def needs_norm(self) -> bool:
        """Whether this step's gradient norm is needed."""
        return False

    def look(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Look at the batches before the first step; returns the stream with every batch put back."""
        return batches

    def begin_step(self) -> None:
        """Called before a step's first micro-batch."""

    def around_backward(self, batch: Batch) -> AbstractContextManager[None]:
        """Context around the backward pass of a micro-batch."""
        return _NOTHING

    def for_record(self) -> Mapping[str, float | None]:
        """Return its entries in a step record."""
        return {}

    def incidents(self) -> Mapping[str, str]:
        """Return what it has to report after a step record: messages by kind of incident."""
        return {}


class Preview(Listener):
    """Only looks at the batches before the first step."""

    def __init__(self, look: Callable[[Iterator[Batch]], Iterator[Batch]]) -> None:
        self._look = look

    def look(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Look at the batches, and put them back."""
        return self._look(batches)
