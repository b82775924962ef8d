"""What does the recipe look like with the proposed changes, and in which file?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import RecipeError
from paceline.recipe.load import to_yaml
from paceline.studies.doctor.findings import Finding
from paceline.studies.doctor.measuring import changed, worthwhile
from paceline.studies.doctor.study import Diagnosis


def check_new(path: Path) -> None:
    """Refuse a file that cannot be written, before anything is looked at.

    Raises:
        RecipeError: If there is something of that name, or no folder for it.
    """
    if path.exists():
        raise RecipeError(f"--apply {path}: there is a file of that name already; name a new one, or remove it.")
    if not path.absolute().parent.is_dir():
        raise RecipeError(f"--apply {path}: there is no folder '{path.absolute().parent}'; make it, or name another.")


def write_improved(path: Path, diagnosis: Diagnosis, *, measured: bool) -> tuple[Finding, ...]:
    """Write the recipe with every change that trains the same thing, and return the findings that are met so.

    Args:
        path: A new file; nothing is written if nothing is to be changed.
        diagnosis: What was found.
        measured: Whether only changes are made that were measured to gain.

    Raises:
        RecipeError: If the changes do not go together, or the file cannot be written.
    """
    met = worthwhile(diagnosis.findings, measured=measured)
    if not met:
        return ()
    overrides: dict[str, Any] = {}
    for finding in reversed(met):  # of two that change one key, the first finding's stands
        overrides |= finding.advice.overrides
    head = [f"# {diagnosis.loaded.name}, with what `paceline doctor` proposed:"]
    head += [f"#   {_said(each.advice.overrides)}  {_why(each)}" for each in met]
    write_new(path, "\n".join(head) + "\n" + to_yaml(changed(diagnosis.loaded.recipe, overrides)))
    return met


def write_new(path: Path, text: str) -> None:
    """Write a recipe to a file that is not there yet.

    Raises:
        RecipeError: If it cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise RecipeError(f"--apply {path}: cannot be written ({error.strerror}).") from error


def _said(overrides: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={'off' if value is None else value}" for key, value in overrides.items())


def _why(finding: Finding) -> str:
    kept = "the same training" if finding.advice.keeps == "same" else "the same training but for rounding"
    return f"({finding.name}; {kept}; {finding.gain or 'not measured'})"
