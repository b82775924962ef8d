"""Logs in formats of other programs, which installed packages write whenever a run ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from paceline.errors import RecipeError
from paceline.recipe.schema import Recipe
from paceline.records.run_directory import RunDirectory
from paceline.registry import installed, load


class RunLog(Protocol):
    """Writes a log of each run.

    Attributes:
        title: What it writes, such as ``the log in MLPerf's format``.
    """

    title: str

    def check(self, recipe: Recipe, *, evaluation_samples: int, peak_lr: float) -> Mapping[str, str]:
        """Check, when a run is planned, that its log is possible; returns notices by dotted key of the recipe.

        Raises:
            RecipeError: If it is not.
        """
        ...

    def write(self, directory: RunDirectory) -> object:
        """Write the log of a run that has ended into its directory; an error does not change how the run ended."""
        ...


def run_logs(recipe: Recipe) -> list[RunLog]:
    """Return the logs of a run, of all installed packages; MLPerf's only if the recipe asks for it."""
    names = {*installed("run_logs"), "mlperf"} - (set() if recipe.telemetry.mlperf else {"mlperf"})
    return [load("run_logs", name, RecipeError)() for name in sorted(names)]


def check_logs(recipe: Recipe, evaluation_samples: int, peak_lr: float) -> dict[str, str]:
    """Check the logs of a run as :meth:`RunLog.check` does, and return the notices of all."""
    notices: dict[str, str] = {}
    for log in run_logs(recipe):
        notices |= log.check(recipe, evaluation_samples=evaluation_samples, peak_lr=peak_lr)
    return notices
