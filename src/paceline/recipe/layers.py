"""Merge base, recipe file and overrides into one mapping, with nothing silently ignored.

Later layers win key by key. Two rules prevent silent mistakes: a key that the schema does not know is refused, and so
is a key that has no effect under the choices made (``optimizer.betas`` with ``sgd``). A layer that makes another choice
(``optimizer.name=adamw``) drops what earlier layers set for the old one, and reports it. Keys also have other names:
former ones, which still work, and those of other trainers, which only messages use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from paceline.errors import RecipeError, did_you_mean
from paceline.parsing.plain_yaml import to_boolean
from paceline.parsing.units import Duration, TimeSpan
from paceline.plugins.dataset_registry import DatasetNames
from paceline.plugins.references import is_reference
from paceline.plugins.registry import built_in, installed, known_names
from paceline.recipe.fields import Applies, Belongs, Names, plain
from paceline.recipe.other_trainers import our_key, our_way
from paceline.recipe.schema import Recipe

Tree = dict[str, Any]
Origin = Literal["file", "override"]
Mark = TypeVar("Mark")

# Resolving a class's annotations is slow, and this is called key by key.
_FIELD_TYPES: dict[type[Any], dict[str, Any]] = {}


def field_types(section: type[Any]) -> dict[str, Any]:
    """Return the annotated types of a section's fields, by name."""
    if section not in _FIELD_TYPES:
        _FIELD_TYPES[section] = get_type_hints(section, include_extras=True)
    return _FIELD_TYPES[section]


def marks(section: type[Any], name: str, kind: type[Mark]) -> tuple[Mark, ...]:
    """Return a field's marks of one kind: what it needs, what it applies to."""
    return tuple(item for item in getattr(field_types(section)[name], "__metadata__", ()) if isinstance(item, kind))


def mark(section: type[Any], name: str, kind: type[Mark]) -> Mark | None:
    """Return a field's first mark of one kind."""
    return next(iter(marks(section, name, kind)), None)


def has_effect(section: type[Any], name: str, choice: object) -> bool:
    """Whether a field has an effect under the value of its deciding field, if there is one.

    Objects registered by other packages may use every field, as may custom code.
    """
    applies = mark(section, name, Applies)
    if applies is None or applies.allow(choice):
        return True
    if isinstance(applies.values, DatasetNames):  # which lists the data sets of other packages too
        return False
    names = mark(section, applies.to, Names)
    if names is None or not isinstance(choice, str):
        return False
    return choice in installed(names.kind) and choice not in built_in(names.kind)


def subsection(section: type[Any], name: str) -> type[Any] | None:
    """Return the section that a field holds, or None if it holds a value."""
    kind = field_types(section)[name]
    kind = getattr(kind, "__origin__", kind)
    is_section = isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind not in (Duration, TimeSpan)
    return kind if is_section else None


def check_known(tree: Mapping[str, Any], where: str, section: type[Any] = Recipe, path: str = "") -> None:
    """Refuse keys that the schema does not have, and values where a section is expected."""
    fields = field_types(section)
    for key, value in tree.items():
        dotted = f"{path}{key}"
        if key not in fields:
            owner = f"'{path.rstrip('.')}'" if path else "a recipe"
            # ``batch.size`` may mean `batch.global_size` or `batch.micro_size`.
            similar = [f"{path}{each}" for each in fields if each.endswith(f"_{key}")]
            candidates = (similar if path and not our_key(str(key)) else []) or keys_for(str(key))
            if way := our_way(str(key)):
                message = f"{where}: unknown key '{dotted}': {way}."
            elif 0 < len(candidates) <= _MOST_CANDIDATES:
                options = " or ".join(f"'{candidate}'" for candidate in candidates)
                message = f"{where}: unknown key '{dotted}'. Did you mean {options}?"
            else:
                # Prefixed with its sections, as an override must write it: `lr` alone is not a key.
                hint = did_you_mean(str(key), fields, shown=lambda name: f"{path}{name}")
                message = f"{where}: unknown key '{dotted}'.{hint} Keys of {owner}: {', '.join(fields)}."
            raise RecipeError(message, key=dotted, value=value, rule="a known key")
        inner = subsection(section, key)
        if inner is not None:
            if value is None:
                continue  # removes the whole section
            if not isinstance(value, Mapping):
                keys = field_types(inner)
                meant = f"Did you mean {dotted}.name={value}? " if "name" in keys and isinstance(value, str) else ""
                message = f"{where}: '{dotted}' is a section, found {value!r}. {meant}"
                message += f"Set one of its keys: {', '.join(keys)}."
                raise RecipeError(message, key=dotted, value=value, rule="a section")
            check_known(value, where, inner, f"{dotted}.")


def normalize_case(tree: Mapping[str, Any], section: type[Any] = Recipe) -> Tree:
    """Return a copy of a layer in which every choice is spelled as in the schema: ``AdamW`` becomes ``adamw``."""
    normalized = dict(tree)
    for key in normalized.keys() & field_types(section).keys():
        value, inner = normalized[key], subsection(section, key)
        if inner is not None and isinstance(value, Mapping):
            normalized[key] = normalize_case(value, inner)
        elif isinstance(value, list):
            normalized[key] = [_normalize_value(each, section, key) for each in value]
        else:
            normalized[key] = _normalize_value(value, section, key)
    return normalized


def _normalize_value(value: Any, section: type[Any], name: str) -> Any:
    names = mark(section, name, Names)
    if not isinstance(value, str) or (names is not None and value in names.values):
        return value
    choices = _choices(section, name)  # type: ignore[arg-type]  # classes are hashable
    if value.lower() not in choices and names is not None:
        choices = {} if value in (known := known_names(names.kind)) else {each.lower(): each for each in known}
    return choices.get(value.lower(), value)


@cache
def _choices(section: Hashable, name: str) -> dict[str, str]:
    """Map a field's choices in lower case to the choices; empty if any text is allowed."""
    assert isinstance(section, type)
    named, parts = named_choices(section, name), list(_type_components(field_types(section)[name]))
    texts = [each for each in (*named, *parts) if isinstance(each, str)]
    return {} if str in parts and not named else {each.lower(): each for each in texts}


def _type_components(kind: Any) -> Iterator[Any]:
    """Yield a type and all of its components, such as the texts of a Literal."""
    yield kind
    for each in get_args(kind):
        yield from _type_components(each)


def keys_for(word: str) -> list[str]:
    """Return dotted keys that a word may mean: another trainer's option (`epochs`), or the end of a key (`lr`)."""
    foreign, suffix = our_key(word), "." + word.strip("-").replace("-", "_")
    return [foreign] if foreign is not None else [key for key in all_keys(Recipe()) if f".{key}".endswith(suffix)]


class Entries(dict[str, Any]):
    """A mapping on the path of an override's dotted key: ``model.options`` in ``model.options.a``."""


class _Replaced(dict[str, Any]):
    """A section or mapping that was removed (``model=null``) before it was set again in the same layer."""


def update(tree: Tree, override: Mapping[str, Any], section: type[Any] | None = Recipe) -> None:
    """Merge an override into the layer of the earlier ones, in place.

    Sections are merged key by key; a mapping given as one value replaces what earlier overrides set.
    """
    for key, value in override.items():
        inner = None if section is None else subsection(section, key)
        current = tree.get(key)
        if isinstance(value, Mapping) and key in tree and current is None:
            current = tree[key] = _Replaced()
        if isinstance(value, Mapping) and isinstance(current, dict):
            if inner is None and not isinstance(value, Entries):
                current.clear()
            update(current, value, inner)
        else:
            tree[key] = value


def merge(
    base: Tree, layer: Mapping[str, Any], notices: list[str], section: type[Any] = Recipe, path: str = ""
) -> Tree:
    """Merge one layer over another; None in the upper layer removes a key."""
    merged = dict(base)
    _drop_old_choices(merged, layer, notices, section, path)
    for key, value in layer.items():
        inner = subsection(section, key)
        if value is None:
            merged.pop(key, None)
            continue
        if isinstance(value, _Replaced):
            merged.pop(key, None)
        if inner is not None:
            merged[key] = merge(dict(merged.get(key, {})), value, notices, inner, f"{path}{key}.")
        elif isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            removed = {name for name, item in value.items() if item is None and name in merged[key]}
            merged[key] = {name: item for name, item in {**merged[key], **value}.items() if name not in removed}
        else:
            merged[key] = value
    return merged


def _drop_old_choices(
    merged: Tree, layer: Mapping[str, Any], notices: list[str], section: type[Any], path: str
) -> None:
    for key in list(merged):
        belongs = mark(section, key, Belongs)
        is_changed = belongs is not None and belongs.to in layer and layer[belongs.to] != merged.get(belongs.to)
        if belongs is not None and is_changed:
            old = merged.pop(key)
            if key not in layer:
                notices.append(_not_used(f"{path}{key}", old, f"{path}{belongs.to}={layer[belongs.to]}"))
            continue
        applies = mark(section, key, Applies)
        if applies is None or applies.to not in layer or key in layer:
            continue
        choice = layer[applies.to]
        # A custom schedule or loss may use every key; a custom optimizer gets none of the keys for built-in ones.
        is_custom_optimizer = path == "optimizer." and is_reference(str(choice))
        if choice is not None and (is_custom_optimizer or not applies.allow(choice)):
            notices.append(_not_used(f"{path}{key}", merged.pop(key), f"{path}{applies.to}={choice}"))


def _not_used(key: str, value: Any, choice: str) -> str:
    shown = "" if isinstance(value, Mapping) else f"={value}"
    return f"{key}{shown} of the recipe is not used with {choice}"


def check_effective(tree: Mapping[str, Any], recipe: Any, where: str, path: str = "") -> None:
    """Refuse keys that were set but have no effect under the recipe's choices."""
    section = type(recipe)
    for key, value in tree.items():
        applies = mark(section, key, Applies)
        if applies is not None and (applies.also_off or to_boolean(value) is not False):
            choice, known = getattr(recipe, applies.to), named_choices(section, applies.to)
            # Where any name is allowed, the code that opens it refuses a misspelt one.
            is_known = choice in known or not known or (isinstance(choice, str) and ":" in choice)
            if is_known and not has_effect(section, key, choice):
                raise RecipeError(
                    f"{where}: '{path}{key}' has no effect with {path}{applies.to}={either((choice,))}; it needs "
                    f"{path}{applies.to}={either(applies.values)}. "
                    f"Remove it (on the command line: {path}{key}=null).",
                    key=f"{path}{key}",
                    value=value,
                    rule="with effect",
                )
        if subsection(section, key) is not None:
            check_effective(value, getattr(recipe, key), where, f"{path}{key}.")


def named_choices(section: type[Any], name: str) -> Collection[object]:
    """Return the built-in names that a text field may hold; empty if it allows any text."""
    names = mark(section, name, Names)
    return () if names is None else names.values


def either(values: Iterable[object]) -> str:
    """Return alternatives as a phrase: "a, b or c"."""
    *rest, last = (str(plain(value)).lower() if isinstance(value, bool | None) else str(value) for value in values)
    return f"{', '.join(rest)} or {last}" if rest else last


def check_used(recipe: Recipe, origins: Mapping[str, Origin], unused: Mapping[str, str]) -> tuple[str, ...]:
    """Refuse overrides that have no effect in the current plan, and report keys of a file that have none.

    A file is written for more than one plan, so keys without effect here are reported, not refused; keys at their
    default value are not even reported, since a run's stored recipe names every key.

    Args:
        recipe: The recipe.
        origins: Where its dotted keys were set.
        unused: Dotted keys that the plan does not use, with the reason.

    Returns:
        One sentence for each key of a file.

    Raises:
        RecipeError: For the first such override.
    """
    notices = []
    for key, reason in unused.items():
        setting = format_override(recipe, key)
        if origins.get(key) == "override":
            message = f"override '{setting}' has no effect: {reason}. Remove it."
            raise RecipeError(message, key=key, rule="with effect")
        if origins.get(key) == "file" and setting != format_override(Recipe(), key):
            notices.append(f"{setting} has no effect: {reason}")
    return tuple(notices)


def format_override(recipe: Recipe, dotted: str) -> str:
    """Format a recipe's key and value as an override."""
    value: Any = recipe
    for key in dotted.split("."):
        value = getattr(value, key)
    text = str(plain(value))
    quote = '"' if " " in text else ""
    return f"{dotted}={quote}{text.lower() if isinstance(value, bool) else text}{quote}"


def set_keys(tree: Mapping[str, Any], section: type[Any] = Recipe, path: str = "") -> Iterator[str]:
    """Yield the dotted keys that a layer sets; None removes a key, so it sets none."""
    for key, value in tree.items():
        inner = subsection(section, key)
        if value is None:
            continue
        if inner is None:
            yield f"{path}{key}"
        else:
            yield from set_keys(value, inner, f"{path}{key}.")


def all_keys(section: Any, path: str = "") -> Iterator[str]:
    """Yield every dotted key of a section at a path."""
    return set_keys(plain(section), type(section), path)


def effective_items(section_value: Any) -> Iterator[tuple[str, Any]]:
    """Yield fields of a section that have an effect, with their values."""
    for field in dataclasses.fields(section_value):
        applies = mark(type(section_value), field.name, Applies)
        if applies is None or has_effect(type(section_value), field.name, getattr(section_value, applies.to)):
            yield field.name, getattr(section_value, field.name)


RENAMED = {
    "data.split_file": "data.saved_split",
    "data.augment.learned_on": "data.augment.policy_dataset",
    "data.boxes": "data.detection",
    "data.clicks": "data.recommendation",
}
"""Old dotted key or section: the new one, within the same section; the old one works until version 1.0."""

_MOST_CANDIDATES = 3


def with_new_names(tree: Mapping[str, Any], notices: list[str] | None = None, path: str = "") -> dict[str, Any]:
    """Return a copy of a layer in which every key has its current name.

    Args:
        tree: Sections and keys, nested.
        notices: Receives one sentence for each old name.
        path: Path of the tree within the recipe, with a trailing dot.

    Raises:
        RecipeError: If a key is given under both names.
    """
    renamed: dict[str, Any] = {}
    for key, value in tree.items():
        dotted = f"{path}{key}"
        new = RENAMED.get(dotted, dotted)
        name = key if new == dotted else new.rpartition(".")[2]
        if name != key and name in tree:
            raise RecipeError(
                f"found '{dotted}' and '{new}', the old and the new name of the same key; remove '{dotted}'.",
                key=dotted,
                value=value,
                rule="under one name",
            )
        if name != key and notices is not None:
            notices.append(f"{dotted} is now called {new}; the old name works until version 1.0")
        holds_renamed = isinstance(value, Mapping) and any(old.startswith(f"{new}.") for old in RENAMED)
        renamed[name] = with_new_names(value, notices, f"{new}.") if holds_renamed else value
    return renamed
