"""The objects that a data set of your own is made of: its attributes, and what its code refers to."""

from __future__ import annotations

import functools
import sys
import sysconfig
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
_INSTALLED = (*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), "<frozen")
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
    yield from (value for _, value in names_in_module(function))
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def names_in_module(function: types.FunctionType) -> list[tuple[str, Any]]:
    """Return what a function's code refers to in its module, by name."""
    names = {name for code in code_in(function.__code__) for name in code.co_names}
    return [(name, function.__globals__[name]) for name in sorted(names) if name in function.__globals__]


def is_of_library(code: types.CodeType) -> bool:
    """Whether code is of an installed library."""
    return code.co_filename.startswith(_INSTALLED)


def in_libraries(kind: type) -> bool:
    """Whether a class is of an installed library, or of Python itself."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file.startswith(_INSTALLED) if file else kind.__module__ != "__main__"


def code_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from code_in(constant)


def _code_of(kind: type) -> Iterator[types.FunctionType]:
    """Yield the methods of a class and its bases, without those of libraries."""
    for each in kind.__mro__:
        if each.__module__.partition(".")[0] not in _LIBRARIES:
            yield from (member for member in vars(each).values() if isinstance(member, types.FunctionType))
