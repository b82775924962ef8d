"""Logs in formats of other programs, which installed packages write whenever a run ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from paceline.errors import RecipeError
from paceline.recipe.schema import Recipe
from paceline.records.run_directory import RunDirectory
from paceline.registry import load


class RunLog(Protocol):
    """A log that a key of the recipe's ``telemetry`` section asks for.

    Attributes:
        title: What it is, as a noun with its article.
    """

    title: str

    def check(self, recipe: Recipe, *, evaluation_samples: int, peak_lr: float) -> Mapping[str, str]:
        """Check before a run that its log is possible; returns notices by dotted key.

        Raises:
            RecipeError: If it is not.
        """
        ...

    def write(self, directory: RunDirectory) -> object:
        """Write the log of a run that has ended into its directory."""
        ...


def run_logs(recipe: Recipe) -> list[RunLog]:
    """Return the logs that a recipe asks for."""
    names = ("mlperf",) if recipe.telemetry.mlperf else ()
    return [load("run_logs", name, RecipeError)() for name in names]
