"""How is a run to a target made in this process, without the seconds that a process of its own takes to begin?

The same run as `paceline train` makes, with the same bits. Where several processes train together, or to be safe from
what ends a process, :func:`paceline_advisor.bench.target.one_run` is for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import TrainingError
from paceline.recipe.load import LoadedRecipe
from paceline.telemetry.display import SilentDisplay
from paceline.trainer.train import Options, train_recipe
from paceline_advisor.bench.target import Target, TargetRun, follow


class _ThereError(BaseException):
    """The target was reached; no error, so that nothing takes it for one."""


class _Watching(SilentDisplay):
    """Stands where the loop shows its progress, and ends it once an evaluation was good enough."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._is_there = False

    def record(self, event: Mapping[str, Any]) -> None:
        value = event.get(self._target.metric) if event["event"] == "evaluation" else None
        self._is_there = self._is_there or (value is not None and self._target.is_met(value))

    def advance(self, step: int) -> None:
        # Not at once: the other set of weights is evaluated after the first.
        if self._is_there:
            raise _ThereError


def run_in_place(loaded: LoadedRecipe, target: Target, run_dir: Path) -> TargetRun:
    """Train until the target.

    Raises:
        PacelineError: For a mistake in the recipe or the data, before training begins.
        KeyboardInterrupt: If the run was asked to stop from outside.
    """
    run = TargetRun(seed=loaded.recipe.seed)
    try:
        result = train_recipe(loaded, Options(run_dir=run_dir, resume="never", display=_Watching(target)))
    except _ThereError:
        result = None
    except TrainingError as error:
        result, run.trouble = None, str(error)
    follow(run, run_dir, target)
    if result is not None and result.status == "stopped" and not run.reached:
        raise KeyboardInterrupt
    if not (run.reached or run.trouble or run.evaluations):
        run.trouble = "it was never evaluated"
    return run
