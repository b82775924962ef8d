"""Observers of a run from Python: objects that hear of steps, evaluations and checkpoints, and may ask to stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import RecipeError

MOMENTS = ("on_step_end", "on_evaluation", "on_checkpoint")


@dataclass
class Callbacks:
    """Calls the observers of a run, on every rank.

    They are told numbers and are given no weights, and nothing that a run draws at random depends on what they draw: a
    run that is observed ends with the same bits. What they raise ends the run.

    Attributes:
        observers: Objects with any of the methods ``on_step_end(step)``, ``on_evaluation(step, results)``, with metric
            values by set of weights, and ``on_checkpoint(step)``, when a checkpoint has been handed over for writing.
            What is true as an answer asks the run to stop, with a checkpoint, after this step or the next.
        stopped_by: Class of the observer that asked first; empty while none has.
    """

    observers: Sequence[object] = ()
    stopped_by: str = ""

    def __post_init__(self) -> None:
        for each in self.observers:
            if not any(callable(getattr(each, moment, None)) for moment in MOMENTS):
                raise RecipeError(
                    f"callback {type(each).__name__} has none of the methods {', '.join(MOMENTS)}; add one."
                )

    def __call__(self, moment: str, *told: Any) -> None:
        """Call the method named ``moment`` of each observer that has one."""
        for each in self.observers:
            observe = getattr(each, moment, None)
            if observe is not None and observe(*told) and not self.stopped_by:
                self.stopped_by = type(each).__name__
