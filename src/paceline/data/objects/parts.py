"""The objects that a data set of your own is made of: its attributes, and what its code refers to."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

# A data set may hold as many objects as samples; generators and transforms are near its top.
_MOST_OBJECTS = 4_000
_MOST_ITEMS = 64
_DEEPEST = 8
_LEAVES = (str, bytes, int, float, complex, bool, type(None), torch.Tensor, np.ndarray, types.ModuleType)
_LIBRARIES = ("torch", "numpy", "builtins", "collections", "typing", "abc", "functools", "pathlib")


def parts_of(data: Any) -> Iterator[Any]:
    """Yield an object and what it refers to, nearest first; large containers are followed only a little way."""
    seen: set[int] = set()
    coming = deque([(data, 0)])
    while coming and len(seen) < _MOST_OBJECTS:
        value, depth = coming.popleft()
        if id(value) in seen or isinstance(value, _LEAVES):
            continue
        seen.add(id(value))
        yield value
        if depth < _DEEPEST:
            coming.extend((each, depth + 1) for each in _referred(value))


def _referred(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return list(value.values())[:_MOST_ITEMS] if type(value).__module__ in ("builtins", "collections") else ()
    if isinstance(value, list | tuple):
        return value[:_MOST_ITEMS]
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, types.MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, types.FunctionType):
        return _of_function(value)
    if isinstance(value, type):
        return ()
    own = vars(value).values() if hasattr(value, "__dict__") else ()
    return (*own, *_code_of(type(value)))


def _of_function(function: types.FunctionType) -> Iterator[Any]:
    """Yield what a function's code refers to: names of its module, and variables around it."""
    if function.__module__.partition(".")[0] in _LIBRARIES:
        return
    names = set(function.__code__.co_names)
    for constant in function.__code__.co_consts:
        names |= set(constant.co_names) if isinstance(constant, types.CodeType) else set()
    yield from (function.__globals__[name] for name in sorted(names) if name in function.__globals__)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def _code_of(kind: type) -> Iterator[types.FunctionType]:
    """Yield the methods of a class and its bases, without those of libraries."""
    for each in kind.__mro__:
        if each.__module__.partition(".")[0] not in _LIBRARIES:
            yield from (member for member in vars(each).values() if isinstance(member, types.FunctionType))
