"""`paceline explain`: explain a recipe key."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import reduce
from textwrap import shorten
from typing import Annotated, Any

from paceline.command import Log, Shape, command
from paceline.pages.page import Table
from paceline.pages.shown import Document, Result, Shown
from paceline.parsing.plain_yaml import yaml_line
from paceline.plugins.registry import installed
from paceline.recipe import layers, reference
from paceline.recipe.fields import Names, plain
from paceline.recipe.layers import with_new_names
from paceline.recipe.load import load_recipe, shipped_recipes
from paceline.recipe.reference import Key
from paceline.recipe.schema import Recipe

_MOST_RELATED = 8
_WIDE = 60  # characters of a meaning in a list


@command("explain")
@dataclass(frozen=True, kw_only=True)
class Explain:
    """Explain a recipe KEY: its values, its default, when it has an effect, an example, related keys.

    For a section, its keys are listed; without KEY, all sections.

    Examples:
      paceline explain optimizer.momentum
      paceline explain schedule
    """

    key: Annotated[str, Shape(argument=True, metavar="[KEY]")] = ""

    def run(self, log: Log) -> Result:
        """Look the key up.

        Raises:
            RecipeError: If there is no such key; names the nearest.
        """
        section: type[Any] | None = Recipe
        found: Key | None = None
        marked: Names | None = None
        if self.key:
            nested: Any = None
            for name in reversed(self.key.split(".")):
                nested = {name: nested}
            layers.check_known(tree := with_new_names(nested), "explain")
            while section is not None and isinstance(tree, dict):
                ((name, tree),) = tree.items()
                path = f"{found.key}." if found else ""
                marked = layers.mark(section, name, Names)
                found = next(each for each in reference.keys(section, path) if each.key == f"{path}{name}")
                section = found.section
        if section is None:
            assert found is not None
            names = {} if marked is None else dict.fromkeys(marked.values) | installed(marked.kind)
            return _of_key(found, list(_all(Recipe, "")), [each for each in names if f"`{each}`" not in found.value])
        keys = [_without_marks(each) for each in reference.keys(section, f"{found.key}." if found else "")]
        rows = [
            (each.key, "section" if each.section else each.default, shorten(each.meaning, _WIDE, placeholder="…"))
            for each in keys
        ]
        table = Table(columns=("key", "default", "meaning"), rows=rows)
        meaning = found.meaning if found else reference.summary(section)
        return Document(
            shown=Shown(title=found.key if found else "", blocks=[meaning, table]),
            document={"section": found.key if found else "", "meaning": meaning, "keys": [*map(_as_json, keys)]},
        )


def _of_key(found: Key, keys: list[Key], names: list[str]) -> Result:
    """Show a key with an example, related keys and the registered names that it takes."""
    example, related = _example(found.key), _related(found, keys)
    found = _without_marks(found)
    words = {
        "takes": found.value,
        **({"names": ", ".join(names)} if names else {}),
        "default": found.default,
        "has an effect": f"with {found.used_with}" if found.used_with else "always",
        "example": example,
        **({"related": ", ".join(related)} if related else {}),
    }
    document = _as_json(found) | {"example": example, "related": related, "names": names}
    return Document(shown=Shown(title=found.key, blocks=[found.meaning, words]), document=document)


def _as_json(found: Key) -> dict[str, Any]:
    return asdict(found) | {"section": found.section is not None}


def _without_marks(found: Key) -> Key:
    texts = {name: getattr(found, name).replace("`", "") for name in ("value", "used_with", "meaning")}
    return replace(found, **texts)


def _all(section: type[Any], path: str) -> Iterator[Key]:
    for each in reference.keys(section, path):
        yield each
        if each.section:
            yield from _all(each.section, f"{each.key}.")


def _related(found: Key, keys: list[Key]) -> list[str]:
    """Return the keys that it names, and those that name it."""

    def names(one: Key, other: Key) -> bool:
        section, _, last = other.key.rpartition(".")
        is_named_by_sibling = section == one.key.rpartition(".")[0] and bool(re.search(rf"`{last}`", one.meaning))
        return is_named_by_sibling or bool(re.search(rf"`{re.escape(other.key)}\b", f"{one.used_with} {one.meaning}"))

    others = (each for each in keys if each.key != found.key and not each.section)
    return [each.key for each in others if names(found, each) or names(each, found)][:_MOST_RELATED]


def _example(key: str) -> str:
    """Return the key as a shipped recipe sets it, or else with its default."""
    name, recipe = "", None
    for name in shipped_recipes():
        loaded = load_recipe(name)
        if key in loaded.origins:
            recipe = loaded.recipe
            break
    value = reduce(getattr, key.split("."), recipe if recipe is not None else load_recipe("digits").recipe)
    setting = shlex.quote(f"{key}={yaml_line(plain(value)).strip(chr(39))}")
    return f"{setting} (as in {name})" if recipe is not None else setting
