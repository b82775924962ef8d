"""What may a batch be made of? Tensors, or tuples, lists and dicts of them, however deep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Nested = Any
"""A tensor, or a tuple, list or dict (by name) of nested ones; what is no tensor stays as it is."""


def mapped(function: Callable[[Tensor], Any], value: Nested) -> Nested:
    """The same structure with ``function`` applied to each tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: mapped(function, each) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple takes its fields one by one
        return type(value)(*(mapped(function, each) for each in value))
    if isinstance(value, list | tuple):
        return type(value)(mapped(function, each) for each in value)
    return value


def tensors_in(*values: Nested) -> Iterator[Tensor]:
    """Every tensor, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from tensors_in(*value.values())
        elif isinstance(value, list | tuple):
            yield from tensors_in(*value)


def rows_of(value: Nested) -> int | None:
    """Samples in a batch's inputs: the length of its first tensor; None where there is none."""
    first = next(tensors_in(value), None)
    return None if first is None or not first.ndim else len(first)


def joined_along_samples(parts: list[Nested]) -> Nested:
    """Parts of a batch put together: tensors along their first axis, lists one after the other.

    Args:
        parts: Of the same structure, at least one.
    """
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts)
    if isinstance(first, dict):
        return {key: joined_along_samples([each[key] for each in parts]) for key in first}
    if isinstance(first, list):
        return [item for each in parts for item in each]
    if isinstance(first, tuple):
        joined = (joined_along_samples([each[index] for each in parts]) for index in range(len(first)))
        return type(first)(*joined) if hasattr(first, "_fields") else tuple(joined)
    return first
