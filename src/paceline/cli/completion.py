"""`paceline completion`: shell completion.

click generates the completions. The differences from click's own are that no space follows a key before its value, and
that the whole line is read from bash, which splits `optimizer.lr=0.1` into three words.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
)
from click.shell_completion import split_arg_string as split

from paceline.command import Log, command
from paceline.files import is_folder
from paceline.pages.shown import Document, Result, Shown

VARIABLE = "_PACELINE_COMPLETE"

_BASH = r"""
%(complete_func)s() {
    local IFS=$'\n' line kind value
    COMPREPLY=()
    while IFS=',' read -r kind value; do
        case $kind in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain) COMPREPLY+=("$value") ;;
            unfinished) COMPREPLY+=("$value"); compopt -o nospace ;;
        esac
    done < <(COMP_WORDS="${COMP_LINE:0:COMP_POINT}" COMP_WORDBREAKS="$COMP_WORDBREAKS" \
        %(complete_var)s=bash_complete "$1")
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""


class _Bash(BashComplete):
    """Bash, which also splits words at ``=`` and ``:``, and replaces only the text after the last of these."""

    source_template = _BASH

    def get_completion_args(self) -> tuple[list[str], str]:
        line = os.environ["COMP_WORDS"]
        words = split(line)[1:]
        return (words, "") if not words or line[-1:].isspace() else (words[:-1], words[-1])

    def format_completion(self, item: CompletionItem[Any]) -> str:
        _, incomplete = self.get_completion_args()
        breaks = set("=:") & set(os.environ.get("COMP_WORDBREAKS", "=:"))
        start = max((incomplete.rfind(character) + 1 for character in breaks), default=0)
        return f"{item.type},{item.value[start:]}"


class _WithoutUnfinished(ShellComplete):
    """A shell that shows unfinished words like complete ones."""

    def format_completion(self, item: CompletionItem[Any]) -> str:
        item.type = "plain" if item.type == UNFINISHED else item.type
        return super().format_completion(item)


class _Zsh(_WithoutUnfinished, ZshComplete):
    """Zsh, which does not add a space after a key or after other values without a description."""

    source_template = ZshComplete.source_template.replace("compadd -U", "compadd -U -S ''")


class _Fish(_WithoutUnfinished, FishComplete):
    """Fish, which does not add a space after ``=`` and ``/`` by default."""


_SHELLS: dict[str, type[ShellComplete]] = {"bash": _Bash, "zsh": _Zsh, "fish": _Fish}


def answer_shells() -> None:
    """Register these classes with click."""
    for kind in _SHELLS.values():
        add_completion_class(kind)


@command("completion")
@dataclass(frozen=True, kw_only=True)
class Completion:
    """Print the script that makes SHELL complete commands, options, recipes, keys, values and run directories.

    Examples:
      echo 'eval "$(paceline completion bash)"' >> ~/.bashrc
      paceline completion zsh > "${fpath[1]}/_paceline"
      paceline completion fish > ~/.config/fish/completions/paceline.fish
    """

    shell: Literal["bash", "zsh", "fish"]

    def run(self, _: Log) -> Result:
        """Return the completion script."""
        script = _SHELLS[self.shell](click.get_current_context().find_root().command, {}, "paceline", VARIABLE).source()
        return Document(document={"shell": self.shell, "script": script}, shown=Shown(blocks=[script.rstrip("\n")]))


Suggest = Callable[[str], Iterator["CompletionItem[str]"]]
UNFINISHED = "unfinished"
"""The kind of an item after which the same word goes on: a key before its value, a folder."""


def add_completion(command: click.Command) -> None:
    """Add completion to the parameters of a command and its subcommands, in place."""
    for parameter in command.params:
        suggest = _SUGGESTIONS.get((command.name or "", parameter.name or "")) or _SUGGESTIONS.get(
            ("", parameter.name or "")
        )
        if suggest is not None:
            parameter.type = _Suggesting(suggest)
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            add_completion(inner)


class _Suggesting(click.types.StringParamType):
    """A parameter type that accepts any text and suggests some values."""

    name = "text"

    def __init__(self, suggest: Suggest) -> None:
        self._suggest = suggest

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        """Return possible completions of the typed text."""
        return [item for item in self._suggest(incomplete) if item.value.startswith(incomplete)]


def recipes(incomplete: str) -> Iterator[CompletionItem[str]]:
    """Suggest shipped recipes, YAML files, and run directories, whose recipe can be repeated."""
    yield from _recipe_names(incomplete)
    yield from _files(incomplete, suffix=".yaml")


def _recipe_names(_: str) -> Iterator[CompletionItem[str]]:
    from paceline.recipe.load import shipped_recipes

    for name, path in shipped_recipes().items():
        with path.open(encoding="utf-8") as file:
            yield CompletionItem(name, help=file.readline().removeprefix("#").strip())


def overrides(incomplete: str) -> Iterator[CompletionItem[str]]:
    """Suggest keys of a recipe and, after a key, its values if there are few, or a path."""
    from paceline.recipe.schema import Recipe

    key, typed, value = incomplete.partition("=")
    kinds = dict(_keys(Recipe, ""))
    if not typed:
        yield from (CompletionItem(f"{name}=", type=UNFINISHED) for name in kinds)
    elif key.endswith("path"):
        yield from (CompletionItem(f"{key}={item.value}", type=item.type) for item in _files(value))
    elif key in kinds:
        yield from (CompletionItem(f"{key}={value}") for value in _values(kinds[key]))


def runs(incomplete: str) -> Iterator[CompletionItem[str]]:
    """Suggest run directories in the current directory, in `runs/`, and below the typed path."""
    if not incomplete and Path("runs").is_dir():
        yield from (item for item in _files("runs/", suffix=None) if item.type != UNFINISHED)
    yield from _files(incomplete, suffix=None)


def targets(incomplete: str) -> Iterator[CompletionItem[str]]:
    """Suggest run directories and weights files."""
    yield from runs(incomplete)
    yield from (item for item in _files(incomplete, suffix=".safetensors") if item.value.endswith(".safetensors"))


# By command and parameter; an entry without a command applies to the parameter of any command.
_SUGGESTIONS: dict[tuple[str, str], Suggest] = {
    ("", "recipe"): recipes,
    ("", "overrides"): overrides,
    ("", "run"): runs,
    ("", "runs"): runs,
    ("", "run_dir"): runs,
    ("", "target"): targets,
    ("mlperf", "targets"): runs,
    ("noise-scale", "target"): lambda incomplete: chain(_recipe_names(incomplete), runs(incomplete)),
    ("recipes", "action"): lambda _: iter([CompletionItem("show")]),
    ("recipes", "name"): _recipe_names,
}


def _keys(section: type[Any], path: str) -> Iterator[tuple[str, Any]]:
    """Return dotted keys with their annotations."""
    from paceline.recipe.layers import field_types, named_choices, subsection

    for name, kind in field_types(section).items():
        inner = subsection(section, name)
        if inner is None:
            yield f"{path}{name}", named_choices(section, name) or kind
        else:
            yield from _keys(inner, f"{path}{name}.")


def _values(kind: Any) -> Iterator[str]:
    """Return the values that an annotation lists."""
    if isinstance(kind, tuple):  # known values of a key that accepts any text
        yield from (str(each) for each in kind if ":" not in str(each))
    elif kind is bool:
        yield from ("true", "false")
    elif get_origin(kind) is Literal:
        yield from map(str, get_args(kind))
    elif get_origin(kind) is Annotated:
        yield from _values(get_args(kind)[0])
    elif get_origin(kind) in (Union, UnionType):
        for part in get_args(kind):
            yield from ["off"] if part is type(None) else _values(part)


def _files(incomplete: str, suffix: str | None = "") -> Iterator[CompletionItem[str]]:
    """Suggest folders, also run directories, and files with the extension at the typed path; None for no files."""
    folder, prefix = os.path.split(incomplete)
    try:
        entries = sorted(os.scandir(os.path.expanduser(folder or ".")), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(".") and not prefix.startswith("."):
            continue
        path = os.path.join(folder, entry.name)  # as typed: with ~, and without ./
        if is_folder(entry):
            is_run = os.path.isfile(os.path.join(entry.path, "recipe.yaml"))
            yield CompletionItem(path, help="run") if is_run else CompletionItem(f"{path}/", type=UNFINISHED)
        elif suffix is not None and entry.name.endswith(suffix):
            yield CompletionItem(path)
