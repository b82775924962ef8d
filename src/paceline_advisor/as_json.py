"""Results as JSON values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any


def as_json(value: Any) -> Any:
    """Return JSON values, also for what is inside: the answer of ``to_json``, or else the fields of a dataclass."""
    if hasattr(value, "to_json"):
        return as_json(value.to_json())
    if is_dataclass(value):
        return as_json(vars(value))
    if isinstance(value, Mapping):
        return {key: as_json(each) for key, each in value.items()}
    return [as_json(each) for each in value] if isinstance(value, list | tuple) else value
