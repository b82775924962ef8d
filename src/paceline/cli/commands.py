"""The commands under their headings, as `--help` lists them.

The core's commands are listed here, so that listing them imports nothing. Other packages, also Paceline's own, add
commands through entry points::

    [project.entry-points."paceline.commands"]
    embed = "mypackage.embed:Embed"

The entry point refers to what :func:`paceline.command.command` declares, which says the heading too, or to a click
command.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Mapping
from typing import NamedTuple

import click

from paceline.errors import PacelineError
from paceline.plugins.installed_packages import recall
from paceline.plugins.loading import loading
from paceline.plugins.references import load_reference
from paceline.plugins.registry import built_in, installed, known_names


class Listed(NamedTuple):
    """A command as listed by `--help`: its summary, and the ``module:name`` that it is loaded from."""

    line: str
    reference: str


_OURS = "paceline.cli"
_CORE: dict[str, dict[str, Listed]] = {
    "Train": {
        "train": Listed("Train a recipe, or your images.", f"{_OURS}.train:Train"),
        "resume": Listed("Resume a run with the options it was started with.", f"{_OURS}.train:Resume"),
    },
    "Use": {
        "evaluate": Listed("Score the weights of a run, a checkpoint or a file.", f"{_OURS}.evaluate:Evaluate"),
        "predict": Listed("Label images, or write text, with trained weights.", f"{_OURS}.predict:Predict"),
        "export": Listed("Write weights as timm, safetensors, ONNX or torch.export.", f"{_OURS}.export:Export"),
        "report": Listed("Write one HTML page about runs, or print where step time went.", f"{_OURS}.report:Report"),
    },
    "Data": {},
    "Before a run": {},
    "Advise": {},
    "Verify": {
        "audit": Listed("Prove that a run used each sample exactly once per epoch.", f"{_OURS}.report:Audit"),
    },
    "Study": {},
    "More": {
        "recipes": Listed("List the shipped recipes, or show one.", f"{_OURS}.available:Recipes"),
        "models": Listed("List the networks a recipe can name.", f"{_OURS}.available:Models"),
        "explain": Listed("Explain a recipe key: values, default, effect, example.", f"{_OURS}.explain:Explain"),
        "env": Listed("Show versions, devices and what is available here.", f"{_OURS}.available:Environment"),
        "completion": Listed("Print the completion script of a shell.", f"{_OURS}.derive:Completion"),
    },
}
_REFERENCES = {name: listed.reference for commands in _CORE.values() for name, listed in commands.items()}
_OTHERS, _WIDE = "From installed packages", 80
# Groups whose commands `paceline --help` lists one by one.
OPEN_GROUPS = ("Train", "Use", "Data", "Before a run", "Advise")
# Old names, which still work but are not listed, and the words they stand for.
ALIASES = {
    "attribution": ("report", "--timing"),
    "environment": ("env",),
    "import-nvidia": ("import", "nvidia"),
    "import-timm": ("import", "timm"),
    "pack-text": ("pack", "--text"),
}


def listing(*, others: bool = False) -> dict[str, dict[str, str]]:
    """Return the summaries of commands by heading and name, in the order of `--help`.

    Args:
        others: Whether to include those of packages that are not Paceline's.

    Raises:
        PacelineError: If two of these register different commands under one name.
    """
    groups = {heading: {name: each.line for name, each in commands.items()} for heading, commands in _CORE.items()}
    if others:
        added = recall("all-commands", lambda: _describe(known_names("commands")))
    else:
        added = recall("commands", lambda: _describe(built_in("commands")))
    for heading, place, name, line in added:
        if name not in _REFERENCES:
            commands = list(groups.get(heading, {}).items())
            commands.insert(place, (name, line))
            groups[heading] = dict(commands)
    return groups


def _describe(references: Mapping[str, str]) -> tuple[list[tuple[str, int, str, str]], set[str] | None]:
    """Return heading, place, name and summary of commands in the order to insert them, and the files that say so."""
    rows, modules, is_complete = [], set(), True
    with loading(), contextlib.redirect_stdout(sys.stderr):  # another package's code may print
        for name, reference in references.items():
            heading, place, line = _OTHERS, sys.maxsize, reference.partition(":")[0]
            modules.add(line)
            try:
                declared = load_reference(reference, PacelineError, installed=True)
                heading = str(getattr(declared, "__paceline_group__", "") or _OTHERS)
                place = int(getattr(declared, "__paceline_place__", place))
                is_click = isinstance(declared, click.Command)
                summary = declared.get_short_help_str(_WIDE) if is_click else inspect.getdoc(declared)
                line = (summary or line).partition("\n")[0]
            except (Exception, SystemExit):  # noqa: BLE001  # another package may fail in any way, and help must not
                is_complete = False
            rows.append((heading, place, name, line))
    files = {getattr(sys.modules.get(module), "__file__", None) or "" for module in modules}
    return sorted(rows, key=lambda row: (row[0] == _OTHERS, *row[1:])), files if is_complete else None


def reference_of(name: str) -> str | None:
    """Return what a command's name refers to, or None; other packages cannot replace a built-in command."""
    return _REFERENCES.get(name) or built_in("commands").get(name) or installed("commands").get(name)


def command_of(name: str) -> click.Command:
    """Import and return a command.

    Raises:
        KeyError: If there is no such command.
        PacelineError: If an installed package's command cannot be imported.
    """
    if (reference := reference_of(name)) is None:
        raise KeyError(name)
    kind = load_reference(reference, PacelineError, installed=True)
    if isinstance(kind, type):
        from paceline.cli.derive import click_command

        return click_command(kind)
    return kind if isinstance(kind, click.Command) else kind()
