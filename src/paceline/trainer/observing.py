"""Observe a few steps of a run for :mod:`paceline.learning`: its records then tell whether it learns, and why not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from paceline.data.batch import Batch, tensors_in
from paceline.learning.copies import FingerprintCollector, count_copies
from paceline.learning.observer import NetworkObserver, has_loss_observed, is_observed
from paceline.records.events import Event, ObservationEvent
from paceline.trainer.evaluate import Evaluation
from paceline.trainer.listeners import Listener
from paceline.trainer.step_stats import Progress

# Steps after which a running mean has forgotten where it began.
_SETTLED = 40


class LearningListener(Listener):
    """Observes the first process's part of some steps.

    Args:
        observer: Observes them.
        progress: The run's counters.
        total_steps: Steps of the run.
    """

    def __init__(self, observer: NetworkObserver, progress: Progress, total_steps: int) -> None:
        self._observer, self._progress, self._total = observer, progress, total_steps
        self._samples = FingerprintCollector()
        self._open: dict[str, int] | None = None
        self._in_full = False
        self._ended: list[tuple[dict[str, int], Callable[[], dict[str, Any]]]] = []

    def begin_step(self) -> None:
        """Begin to observe a step, if it is due."""
        self._end()
        position = self._progress.position
        if has_loss_observed(position, self._total):
            self._open = {"step": self._progress.step + 1, "position": position + 1}
            self._in_full = is_observed(position, self._total)
            if self._in_full:
                self._observer.begin(statistics=position >= _SETTLED)

    def around_forward(self, model: Callable[..., Any], batch: Batch) -> AbstractContextManager[None]:
        """Observe a micro-batch's loss, and note its samples."""
        if self._open is None:
            return nullcontext()
        self._samples.add(tensors_in(batch.inputs))
        return self._observer.around_forward(model)

    def around_backward(self, batch: Batch) -> AbstractContextManager[None]:
        """Observe the gradients after the last micro-batch."""
        return self._after_backward() if self._in_full and batch.slice.is_last else nullcontext()

    @contextmanager
    def _after_backward(self) -> Iterator[None]:
        yield
        self._observer.after_backward()

    def for_evaluation(self, evaluation: Evaluation) -> Mapping[str, Any]:
        """Return what the loss was given, and how many samples of observed steps were scored too."""
        found = {"losses": evaluation.losses, "copies": count_copies(self._samples.prints(), evaluation.prints)}
        return {name: each for name, each in found.items() if each}

    def events(self) -> Iterable[Event]:
        """Return the observations since the last record; waits for the device."""
        self._end()
        self._samples.prints()  # off the device
        ended, self._ended = self._ended, []
        found = ((here, observed()) for here, observed in ended)
        return [ObservationEvent(**here, split="train", details=details) for here, details in found if details]

    def _end(self) -> None:
        """End the step, whose update has been made by now."""
        here, self._open, self._in_full = self._open, None, False
        if here is not None:
            self._ended.append((here, self._observer.end()))
