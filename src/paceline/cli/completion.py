"""`paceline completion`: click's shell completion, with the names and keys of recipes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click
from click.shell_completion import CompletionItem, get_completion_class

from paceline.command import Log, command
from paceline.pages.shown import Document, Result, Shown

VARIABLE = "_PACELINE_COMPLETE"
# click's scripts add a space after each word; a key's value follows without one.
_SPACES = {
    "bash": ("COMPREPLY+=($value)", "COMPREPLY+=($value); [[ $value == *= ]] && compopt -o nospace"),
    "zsh": ("compadd -U", "compadd -U -S ''"),
    "fish": ("", ""),  # adds none after `=`
}


@command("completion")
@dataclass(frozen=True, kw_only=True)
class Completion:
    """Print the script that makes SHELL complete commands, options, recipes, keys, values and paths.

    Examples:
      echo 'eval "$(paceline completion bash)"' >> ~/.bashrc
      paceline completion zsh > "${fpath[1]}/_paceline"
      paceline completion fish > ~/.config/fish/completions/paceline.fish
    """

    shell: Literal["bash", "zsh", "fish"]

    def run(self, _: Log) -> Result:
        """Return the completion script."""
        kind = get_completion_class(self.shell)
        assert kind is not None
        script = kind(click.get_current_context().find_root().command, {}, "paceline", VARIABLE).source()
        script = script.replace(*_SPACES[self.shell])
        return Document(document={"shell": self.shell, "script": script}, shown=Shown(blocks=[script.rstrip("\n")]))


def recipes(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Suggest paths and shipped recipes."""
    from paceline.recipe.load import shipped_recipes

    found = [CompletionItem(incomplete, type="file")]
    for name, path in shipped_recipes().items():
        if name.startswith(incomplete):
            with path.open(encoding="utf-8") as file:
                found.append(CompletionItem(name, help=file.readline().removeprefix("#").strip()))
    return found


def overrides(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Suggest keys of a recipe and, after a key, its values if there are few."""
    from paceline.recipe.schema import Recipe

    key, typed, _value = incomplete.partition("=")
    kinds = dict(_keys(Recipe, ""))
    words = [f"{key}={value}" for value in _values(kinds.get(key))] if typed else [f"{name}=" for name in kinds]
    return [CompletionItem(word) for word in words if word.startswith(incomplete)]


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
    if isinstance(kind, Collection):  # known values of a key that accepts any text
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
