"""Change a recipe, and write it to a new file for `--apply`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from paceline.errors import RecipeError
from paceline.parsing.units import Duration
from paceline.recipe.running import Checkpoint, Profile, Telemetry
from paceline.recipe.schema import Recipe
from paceline.recipe.training import Schedule

QUIET: Mapping[str, Any] = MappingProxyType(
    {
        "schedule": Schedule(name="constant"),
        "checkpoint": Checkpoint(every=None, keep_best=False),
        "telemetry": Telemetry(log_every=Duration(1, "steps"), trackers=()),
    }
)
"""Values of a short run whose result does not matter."""

SILENT: Mapping[str, Any] = MappingProxyType(
    {
        # A run that was stopped, to be resumed later, is not a result.
        "train.until": None,
        "checkpoint": QUIET["checkpoint"],
        "telemetry.trackers": (),
        "telemetry.profile": Profile(),
        "telemetry.noise_scale": None,
        "telemetry.mlperf": False,
    }
)
"""Values of a run that only a study reads."""


def with_values(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """Return a recipe with other values or sections by dotted key; they are not validated."""
    for key, value in values.items():
        recipe = _with_value(recipe, key.split("."), value)
    return recipe


def _with_value(section: Any, path: Sequence[str], value: Any) -> Any:
    name, *rest = path
    return replace(section, **{name: _with_value(getattr(section, name), rest, value) if rest else value})


def check_new(path: Path | None) -> None:
    """Refuse an unwritable file before anything is measured; None means no file.

    Raises:
        RecipeError: If it exists, or its folder does not.
    """
    if path is None:
        return
    folder = path.absolute().parent
    if os.path.lexists(path):
        raise RecipeError(f"--apply {path}: this file already exists; name a new one, or remove it.")
    if not folder.is_dir():
        raise RecipeError(f"--apply {path}: there is no folder '{folder}'; create it, or name another.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RecipeError(f"--apply {path}: '{folder}' is not writable; name a file in another folder.")


def write_new(path: Path, text: str) -> None:
    """Write a recipe to a file that does not exist yet.

    Raises:
        RecipeError: If it cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise RecipeError(f"--apply {path}: cannot be written ({error.strerror}).") from error
