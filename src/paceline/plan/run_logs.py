"""Logs in formats of other programs, which installed packages write whenever a run ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from paceline.errors import RecipeError
from paceline.plugins.registry import known_names, load
from paceline.recipe.schema import Recipe
from paceline.records.run_directory import RunDirectory


class RunLog(Protocol):
    """Writes a log of each run.

    Attributes:
        title: What it writes, as the subject of a sentence, such as ``the log for the lab``.
        files: Names of its files in the run directory, which are removed when the run is resumed.
    """

    title: str
    files: Sequence[str]

    def wanted(self, recipe: Recipe) -> bool:
        """Whether the recipe asks for it."""
        ...

    def check(self, recipe: Recipe, *, evaluation_samples: int, peak_lr: float) -> Mapping[str, str]:
        """Check, when a run is planned, that its log is possible; returns notices by dotted key of the recipe.

        Raises:
            RecipeError: If it is not.
        """
        ...

    def write(self, directory: RunDirectory) -> object:
        """Write the log of a run that has ended into its directory; an error does not change how the run ended."""
        ...


def run_logs() -> list[RunLog]:
    """Return the logs of all installed packages."""
    return [load("run_logs", name, RecipeError)() for name in sorted(known_names("run_logs"))]


def log_files(directory: RunDirectory) -> list[Path]:
    """Return the files of all logs in a run directory."""
    return [directory.root / name for log in run_logs() for name in log.files]


def check_logs(recipe: Recipe, evaluation_samples: int, peak_lr: float) -> dict[str, str]:
    """Check the logs that a recipe asks for as :meth:`RunLog.check` does, and return the notices of all."""
    notices: dict[str, str] = {}
    for log in run_logs():
        if log.wanted(recipe):
            notices |= log.check(recipe, evaluation_samples=evaluation_samples, peak_lr=peak_lr)
    return notices
