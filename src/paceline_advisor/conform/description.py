"""The description of a program: how it is started and resumed, and what it leaves on disk."""

from __future__ import annotations

import ast
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import yaml

from paceline.errors import PacelineError, did_you_mean
from paceline.parsing.files import refuse_special_inputs
from paceline.parsing.plain_yaml import BoundedLoader
from paceline_advisor import frozen

FILE = "conform.yaml"
_VARIABLE = "CONFORM"
_PLACES = ("python", "here", "processes")


class DescriptionError(PacelineError):
    """A description that cannot be followed."""


@frozen
class Description:
    """A training program, as its user starts it.

    In commands, ``{python}`` is the interpreter, ``{here}`` the description's folder, and ``{processes}`` their number;
    without the last, the program is run with one process only. Each run has an empty working directory.

    Attributes:
        start: The command that starts a training.
        resume: The command that resumes it in the same directory, as its documentation says.
        epochs: Epochs of the training.
        checkpoints: Pattern of the files or folders that it saves, relative to its working directory. Where the name
            has ``{step}``, it is the number of optimizer steps; else a checkpoint counts from the moment it appears.
        steps: Optimizer steps of the training; needed for ``{step}``.
        weights: File of final weights: safetensors, or what torch reads with ``weights_only``.
        epoch: What an epoch holds: each sample ``once``, without the rest of a batch (``drop``), with some samples
            twice so that ranks get equally many (``pad``), or samples ``drawn`` at random.
        random: Whether the training data set draws random numbers, so that a sample differs between epochs.
        packages: Names of packages whose versions the report shows.
        limit_seconds: Time limit of a run.
    """

    start: str
    resume: str
    epochs: int
    checkpoints: str
    steps: int | None = None
    weights: str | None = None
    epoch: Literal["once", "drop", "pad", "drawn"] = "once"
    random: bool = False
    packages: tuple[str, ...] = ()
    limit_seconds: int = 600

    @property
    def takes_processes(self) -> bool:
        """Whether the program can be started with several processes."""
        return "{processes}" in self.start

    @property
    def pattern(self) -> str:
        """The pattern of checkpoints for the file system."""
        return self.checkpoints.replace("{step}", "*")

    def command(self, text: str, here: Path, python: Path, processes: int) -> list[str]:
        """Return the words of a command."""
        values = {"python": str(python), "here": str(here), "processes": str(processes)}
        words = shlex.split(text)
        for name, filled in values.items():
            words = [word.replace(f"{{{name}}}", filled) for word in words]
        return words


def read_description(path: Path) -> tuple[Description, Path]:
    """Read the description in a folder, a YAML file, or a literal ``CONFORM = {...}`` of a Python file, and its folder.

    No code of the file is run.

    Raises:
        DescriptionError: If there is none, or it is wrong.
    """
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise DescriptionError(
            f"there is no file '{file}'; give a folder with {FILE}, a YAML file, or a Python file with {_VARIABLE}."
        )
    refuse_special_inputs(file)
    try:
        text = file.read_text(encoding="utf-8-sig")
        tree = _literal(text, file) if file.suffix == ".py" else yaml.load(text, Loader=BoundedLoader)
    except (OSError, ValueError, TypeError, SyntaxError, RecursionError, yaml.YAMLError) as error:
        raise DescriptionError(f"'{file}' cannot be read: {' '.join(str(error).split())[:200]}") from None
    return _checked(tree, file), file.resolve().parent


def _literal(text: str, file: Path) -> Any:
    for node in ast.parse(text).body:
        names = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign) and any(getattr(name, "id", "") == _VARIABLE for name in names):
            try:
                return ast.literal_eval(node.value or "None")
            except (ValueError, TypeError):
                raise DescriptionError(
                    f"{_VARIABLE} in '{file}' is computed, and no code of it is run; write a dict of texts, numbers "
                    "and lists, without names, calls or f-strings."
                ) from None
    raise DescriptionError(f"'{file}' has no {_VARIABLE} = {{...}}; add it, or write {FILE} next to the program.")


def _checked(tree: Any, file: Path) -> Description:
    known = {field.name: field for field in fields(Description)}
    if not isinstance(tree, dict):
        raise DescriptionError(
            f"'{file}' has no NAME: VALUE lines; it needs at least start, resume, epochs, checkpoints."
        )
    problems = [
        f"unknown key '{name}'.{did_you_mean(str(name), known)} Known: {', '.join(known)}."
        for name in tree
        if name not in known
    ]
    missing = [name for name in ("start", "resume", "epochs", "checkpoints") if name not in tree]
    problems += [f"missing: {', '.join(missing)}."] if missing else []
    rules: dict[str, tuple[bool, str]] = {}
    for name, value in tree.items():
        rules["text"] = isinstance(value, str) and bool(value.strip()), "a text that is not empty"
        rules["count"] = type(value) is int and value > 0, "a whole number of at least 1"
        rules["epoch"] = value in ("once", "drop", "pad", "drawn"), "once, drop, pad or drawn"
        rules["random"] = isinstance(value, bool), "true or false"
        is_list = isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)
        rules["packages"] = is_list, "a list of names"
        kind = "count" if name in ("epochs", "steps", "limit_seconds") else name if name in rules else "text"
        is_right, rule = rules[kind]
        if name in known and not is_right:
            problems.append(f"{name}: {value!r} must be {rule}.")
    if not problems:
        problems = _unusable(tree)
    if problems:
        raise DescriptionError(f"{file}: {' '.join(problems)}")
    return Description(**{**tree, "packages": tuple(tree.get("packages", ()))})


def _unusable(tree: dict[str, Any]) -> list[str]:
    problems = []
    for name in ("start", "resume"):
        try:
            shlex.split(tree[name])
        except ValueError as error:
            problems.append(f"{name}: {tree[name]!r} is not a command ({error}).")
    if ("{processes}" in tree["start"]) != ("{processes}" in tree["resume"]):
        problems.append("{processes} must be in both start and resume, or in neither.")
    if "{step}" in tree["checkpoints"] and not tree.get("steps"):
        problems.append("checkpoints has {step}, so steps is needed: the optimizer steps of the training.")
    if tree.get("steps", tree["epochs"]) % tree["epochs"]:
        problems.append(f"steps: {tree['steps']} must be a multiple of epochs: {tree['epochs']}.")
    if any(
        Path(tree.get(name) or "x").is_absolute() or ".." in Path(tree.get(name) or "x").parts
        for name in ("checkpoints", "weights")
    ):
        problems.append("checkpoints and weights must be relative to the working directory, without '..'.")
    return problems
