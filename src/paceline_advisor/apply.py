"""Write a recipe to a new file, for `--apply`."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.errors import RecipeError


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
