"""What does the recipe look like with the proposed changes, and in which file?"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import RecipeError
from paceline.recipe.layers import set_keys, spelled
from paceline.recipe.load import to_tree, to_yaml
from paceline.recipe.schema import Recipe
from paceline_advisor.doctor.changes import Plans, changed
from paceline_advisor.doctor.findings import Finding
from paceline_advisor.doctor.measuring import worthwhile
from paceline_advisor.doctor.study import Diagnosis


@dataclass(frozen=True, kw_only=True)
class Improved:
    """What was written.

    Attributes:
        met: The findings whose change was made.
        left_out: Those whose change was not, by name, with the reason.
        lines: What of the recipe is otherwise: ``- key=before`` and ``+ key=now``.
    """

    met: tuple[Finding, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    lines: tuple[str, ...] = ()


def check_new(path: Path) -> None:
    """Refuse a file that cannot be written, before anything is looked at.

    Raises:
        RecipeError: If there is something of that name, or no folder for it.
    """
    if os.path.lexists(path):
        raise RecipeError(f"--apply {path}: there is a file of that name already; name a new one, or remove it.")
    if not path.absolute().parent.is_dir():
        raise RecipeError(f"--apply {path}: there is no folder '{path.absolute().parent}'; make it, or name another.")
    if not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        raise RecipeError(
            f"--apply {path}: nothing may be written in '{path.absolute().parent}'; name a file in another folder."
        )


def write_improved(path: Path, diagnosis: Diagnosis, *, measured: bool) -> Improved:
    """Write the recipe with every change that trains the same thing and that its plan takes, beside those before it.

    Args:
        path: A new file; nothing is written if nothing is to be changed.
        diagnosis: What was found.
        measured: Whether only changes are made that were measured to gain.

    Raises:
        RecipeError: If the file cannot be written.
    """
    met, overrides, left_out = _that_go_together(diagnosis, worthwhile(diagnosis.findings, measured=measured))
    if not met:
        return Improved(left_out=left_out)
    before = diagnosis.loaded.recipe
    after = changed(before, overrides)
    head = [f"# {diagnosis.loaded.name}, with what `paceline doctor` proposed:"]
    head += [f"#   {_said(each.advice.overrides)}  {_why(each)}" for each in met]
    write_new(path, "\n".join(head) + "\n" + to_yaml(after))
    return Improved(met=met, left_out=left_out, lines=tuple(_differences(before, after)))


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


def _that_go_together(
    diagnosis: Diagnosis, findings: tuple[Finding, ...]
) -> tuple[tuple[Finding, ...], dict[str, Any], dict[str, str]]:
    """Findings whose changes a plan takes, one after the other: their overrides, and the others with the reason."""
    plans = Plans(diagnosis)
    met: list[Finding] = []
    overrides: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for finding in findings:
        asked = finding.advice.overrides
        if other := next((key for key, value in asked.items() if overrides.get(key, value) != value), None):
            left_out[finding.name] = f"{other} is changed to {overrides[other]} already"
        elif why := plans.refusal(overrides | dict(asked)):
            left_out[finding.name] = why
        else:
            met.append(finding)
            overrides |= asked
    return tuple(met), overrides, left_out


def _differences(before: Recipe, after: Recipe) -> list[str]:
    keys = dict.fromkeys([*set_keys(to_tree(before)), *set_keys(to_tree(after))])
    pairs = [(key, spelled(before, key), spelled(after, key)) for key in keys]
    return [line for _, old, new in pairs if old != new for line in (f"- {old}", f"+ {new}")]


def _said(overrides: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={'off' if value is None else value}" for key, value in overrides.items())


def _why(finding: Finding) -> str:
    kept = "the same training" if finding.advice.keeps == "same" else "the same training but for rounding"
    return f"({finding.name}; {kept}; {finding.gain or 'not measured'})"
