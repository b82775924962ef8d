"""Describe a recipe's keys from the schema and its source, for `paceline explain` and the recipe reference."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator
from pydantic.fields import FieldInfo

from paceline.parsing.units import Duration, TimeSpan
from paceline.recipe import data, running
from paceline.recipe.fields import Applies, Needs, Off, plain
from paceline.recipe.layers import either, field_types, mark, marks, subsection
from paceline.recipe.schema import Recipe

TYPE_NAMES = {str: "text", int: "whole number", float: "number", bool: "`true` or `false`", NoneType: ""}
TYPE_NAMES |= {Duration: "duration", TimeSpan: "time"}
COMPARISONS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
# A larger bound is beyond any practical value.
MAX_SHOWN_BOUND = 10**9
_LONG = 5  # digits
# Validators that restrict the value; all others only normalise it.
VALIDATORS = dict.fromkeys((data.check_unique, running.check_unique), "each once") | {
    data.ascending: "the smaller first"
}


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key of a recipe in words.

    Attributes:
        key: Its dotted name.
        section: The class of the section that it holds; None if it holds a value.
        value: The values it accepts.
        default: Its default, as written in a recipe.
        used_with: The values of other keys with which it has an effect; empty if it always has one.
        meaning: Its purpose.
    """

    key: str
    section: type[Any] | None
    value: str = ""
    default: str = ""
    used_with: str
    meaning: str


def summary(section: type[Any] = Recipe) -> str:
    """Return the first line of a section's docstring."""
    return (section.__doc__ or "").splitlines()[0]


def keys(section: type[Any] = Recipe, path: str = "") -> Iterator[Key]:
    """Yield the keys of a section at a path (``data.augment.``), in order."""
    meanings, default = _texts(section), section()
    for name, kind in field_types(section).items():
        inner, used_with = subsection(section, name), _used_with(section, name, path)
        if inner is not None:
            meaning = meanings.get(name) or summary(inner)
            yield Key(key=f"{path}{name}", section=inner, used_with=used_with, meaning=meaning)
            continue
        yield Key(
            key=f"{path}{name}",
            section=None,
            value=describe_type(kind),
            default=_written(plain(getattr(default, name))),
            used_with=used_with,
            meaning=meanings[name],
        )


def _texts(section: type[Any]) -> dict[str, str]:
    """Return the text under each field, which is only in the source."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for node, following in zip(definition.body, definition.body[1:], strict=False):
        match node, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = " ".join(text.split())
    return texts


def describe_type(kind: Any) -> str:
    """Describe in words which values a type accepts."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in TYPE_NAMES:
        return TYPE_NAMES[kind]
    if origin in (Union, UnionType):
        return " or ".join(filter(None, map(describe_type, arguments)))
    if origin is Annotated:
        return _annotated(describe_type(arguments[0]), arguments[1:])
    if origin is Literal:
        return either(f"`{_written(each)}`" for each in arguments)
    if origin is tuple:
        length = "" if arguments[-1] is ... else f" of {len(arguments)}"
        return f"list{length}{': ' if length else ' of: '}{describe_type(arguments[0])}"
    if origin is dict:
        if not dataclasses.is_dataclass(arguments[1]):
            return "mapping"
        fields = field_types(arguments[1])  # type: ignore[arg-type]  # always a class here
        return f"mapping to: {', '.join(f'`{name}` ({describe_type(each)})' for name, each in fields.items())}"
    raise ValueError(f"there are no words for the type {kind}: add some to {__file__}.")


def _annotated(text: str, notes: tuple[Any, ...]) -> str:
    for note in notes:
        if note is Off:
            text += " or `off`"
        elif isinstance(note, AfterValidator) and note.func in VALIDATORS:
            text += f", {VALIDATORS[note.func]}"
        elif isinstance(note, FieldInfo):
            bounds = [
                (COMPARISONS[name], getattr(each, name))
                for each in note.metadata
                for name in COMPARISONS
                if hasattr(each, name)
            ]
            limits = " and ".join(f"{sign} {_number(value)}" for sign, value in bounds if value <= MAX_SHOWN_BOUND)
            text += f"{' and' if text[-1].isdigit() and limits else ''} {limits}".rstrip()
    return text


def _number(value: float) -> str:
    digits = str(value)
    return f"10^{len(digits) - 1}" if len(digits) > _LONG and digits.strip("0") == "1" else digits


def _used_with(section: type[Any], name: str, path: str) -> str:
    """Describe which values of other keys a key requires to have an effect, and which other keys it needs."""
    parts = []
    for needs in marks(section, name, Needs):
        # Conditions without a dot, such as "warm-up", belong to the plan and are not keys.
        conditions = [f"`{each.replace('!=', '` other than `')}`" for each in needs.any_of if "." in each]
        parts += [" or ".join(conditions)] if conditions else []
    if applies := mark(section, name, Applies):
        parts.append(f"`{path}{applies.to}` = {either(f'`{_written(plain(value))}`' for value in applies.values)}")
    return "; ".join(parts)


def _written(value: Any) -> str:
    """Format a value as a recipe would write it."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, float):
        return f"{value:.4g}" if value != round(value, 6) else str(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
