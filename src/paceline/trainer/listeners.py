"""What follows a run without changing it: listeners inside the trainer, and callbacks from Python.

``build_run`` fills one list of listeners; the step and the records know only what is here.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from paceline.data.batch import Batch
from paceline.errors import RecipeError
from paceline.records.events import Event

if TYPE_CHECKING:
    from paceline.trainer.evaluate import Evaluation

TRACE_VARIABLE = "PACELINE_TRACE"
"""Set by a study that follows each step of a run: see ``trainer/tracing.py``."""
_NOTHING = nullcontext()


class Listener:
    """Follows a run; changes no weight, buffer, random state or batch. Each method does nothing unless overridden."""

    @property
    def needs_norm(self) -> bool:
        """Whether this step's gradient norm is needed."""
        return False

    def begin_step(self) -> None:
        """Called before a step's first micro-batch."""

    def around_forward(self, model: Callable[..., Any], batch: Batch) -> AbstractContextManager[None]:
        """Context around the loss of a micro-batch, whose network is called as this model."""
        return _NOTHING

    def after_loss(self, loss: torch.Tensor) -> None:
        """Called with the loss of a micro-batch."""

    def around_backward(self, batch: Batch) -> AbstractContextManager[None]:
        """Context around the backward pass of a micro-batch."""
        return _NOTHING

    def for_evaluation(self, evaluation: Evaluation) -> Mapping[str, Any]:
        """Return what to record with an evaluation."""
        return {}

    def for_record(self) -> Mapping[str, float | None]:
        """Return its entries in a step record."""
        return {}

    def events(self) -> Iterable[Event]:
        """Return the records to write before a step record."""
        return ()

    def incidents(self) -> Mapping[str, str]:
        """Return what it has to report after a step record: messages by kind of incident."""
        return {}


MOMENTS = ("on_step_end", "on_evaluation", "on_checkpoint")


@dataclass
class Callbacks:
    """Calls the observers of a run, on every rank.

    They receive numbers, not weights, and the random numbers they draw do not affect the run: the final weights are the
    same with and without them. An exception ends the run.

    Attributes:
        observers: Objects with any of the methods ``on_step_end(step)``, ``on_evaluation(step, results)``, where
            ``results`` holds the metric values of each set of weights, and ``on_checkpoint(step)``, when a checkpoint
            has been handed over for writing. A true return value stops the run, with a checkpoint, after this step or
            the next.
        stopped_by: Class of the first observer that requested a stop; empty before that.
        prints: Whether what they print is shown.
    """

    observers: Sequence[object] = ()
    stopped_by: str = ""
    prints: bool = True

    def __post_init__(self) -> None:
        for each in self.observers:
            if not any(callable(getattr(each, moment, None)) for moment in MOMENTS):
                raise RecipeError(
                    f"callback {type(each).__name__} has none of the methods {', '.join(MOMENTS)}; add one."
                )

    def __call__(self, moment: str, *details: Any) -> None:
        """Call the method named ``moment`` of each observer that has one."""
        for each in self.observers:
            observe = getattr(each, moment, None)
            if observe is None:
                continue
            with nullcontext() if self.prints else redirect_stdout(io.StringIO()):
                # A copy: an observer may change what it receives, and the run still uses it.
                stops = observe(*deepcopy(details))
            if stops and not self.stopped_by:
                self.stopped_by = type(each).__name__
