"""Tools around a run: estimate its cost, find bottlenecks, choose settings, and check correctness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, TypeVar, dataclass_transform

Json = dict[str, Any]
"""A JSON object."""
_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def frozen(kind: type[_T]) -> type[_T]:
    """Make a class a frozen dataclass with keyword-only fields."""
    return dataclass(frozen=True, kw_only=True)(kind)


def named(names: Sequence[str], most: int = 4) -> str:
    """List the first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def picked(source: Any, *names: str) -> Json:
    """Return some attributes of an object, by name."""
    return {name: getattr(source, name) for name in names}


def as_json(value: Any) -> Any:
    """Return JSON values, also for what is inside: the answer of ``to_json``, or else the fields of a dataclass."""
    if hasattr(value, "to_json"):
        return as_json(value.to_json())
    if is_dataclass(value):
        return as_json(vars(value))
    if isinstance(value, Mapping):
        return {key: as_json(each) for key, each in value.items()}
    return [as_json(each) for each in value] if isinstance(value, list | tuple) else value
