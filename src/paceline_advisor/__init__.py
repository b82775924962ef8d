"""Tools around a run: estimate its cost, find bottlenecks, choose settings, and check correctness."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar, dataclass_transform

Json = dict[str, Any]
"""A JSON object."""
_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def frozen(kind: type[_T]) -> type[_T]:
    """Make a class a frozen dataclass with keyword-only fields."""
    return dataclass(frozen=True, kw_only=True)(kind)
