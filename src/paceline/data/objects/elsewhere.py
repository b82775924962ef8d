"""Let a forked process find what another process, or a later one, would: other hashes, addresses, orders and times.

Code of libraries keeps the addresses that it has used as keys, and so do objects with a ``__hash__`` of their own.
"""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import os
import re
import sys
import textwrap
import time
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date, datetime, timedelta
from enum import Enum
from functools import partial
from pathlib import Path, PurePath
from typing import Any
from unittest.mock import patch

from torch.utils.data._utils import worker as torch_worker

from paceline.data.objects.parts import code_in, is_of_library, names_in_module, parts_of

_SETS = (set, frozenset)
_LATER_SECONDS = 100_003
_CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime")
# What formats the time: the place of the argument that is the current time by default.
_FORMATS = {"localtime": 0, "gmtime": 0, "ctime": 0, "asctime": 0, "strftime": 1}


def has_fixed_hashes(environment: bytes) -> bool:
    """Whether a process that was started in this environment hashes text as every other one does.

    A program that sets the variable itself is too late.
    """
    return re.search(rb"(?:^|\0)PYTHONHASHSEED=\d", environment) is not None


try:
    _FIXED_HASHES = has_fixed_hashes(Path("/proc/self/environ").read_bytes())
except OSError:  # another system
    _FIXED_HASHES = False


class _StandIn(type):
    """Makes a class whose instances are those of the class that it extends."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.__mro__[1])


def as_other_worker(data: Any) -> None:
    """Be another loader process."""
    info = torch_worker.WorkerInfo(id=1, num_workers=3, seed=1, dataset=data)
    torch_worker._worker_info = info  # noqa: SLF001  # get_worker_info() reads it; torch has no setter
    number = os.getpid() + 1
    patch.multiple("os", getpid=lambda: number, getppid=lambda: number).start()


def with_other_hashes(_: Any) -> None:
    """Have ``hash()`` begin with another seed."""

    def salted(value: Any) -> int:
        is_key = _caller().co_name == "__hash__"  # dicts hold such objects under their former hash
        return built_in(("salted", value)) if _is_salted(value) and not is_key else built_in(value)

    built_in = builtins.hash
    builtins.hash = salted


def with_other_addresses(_: Any) -> None:
    """Have ``id()`` return other numbers to code of yours."""

    def moved(value: Any) -> int:
        return built_in(value) + 2**20 * (not is_of_library(_caller()))

    built_in = builtins.id
    builtins.id = moved


def _caller() -> types.CodeType:
    return sys._getframe(2).f_code  # noqa: SLF001  # inspect.stack() would read source files at each call


def _is_salted(value: Any) -> bool:
    """Whether a hash differs from process to process: of text, or an address."""
    if isinstance(value, tuple | frozenset):
        return any(map(_is_salted, value))
    hashed: Any = type(value).__hash__
    is_text = isinstance(value, str | bytes | Enum | date | PurePath)
    return (is_text and not _FIXED_HASHES) or hashed is object.__hash__


def _reversing(kind: Any) -> Any:
    """Return a class for sets of the same members in the opposite order, as another hash seed may give."""

    def in_other_order(self: Any) -> Iterator[Any]:
        members = [*kind.__iter__(self)]
        return iter(members[::-1] if any(map(_is_salted, members)) else members)

    def pop(self: Any) -> Any:
        first = next(iter(self))
        self.remove(first)
        return first

    def of_same_kind(name: str) -> Callable[..., Any]:
        def method(*arguments: Any) -> Any:
            found = getattr(kind, name)(*arguments)
            return made(found) if isinstance(found, _SETS) else found

        return method

    names = ("__and__", "__or__", "__sub__", "__xor__", "union", "intersection", "difference", "copy")
    own = {name: of_same_kind(name) for name in names} | {"__iter__": in_other_order}
    made = _StandIn(kind.__name__, (kind,), own | ({"pop": pop} if hasattr(kind, "pop") else {}))
    return made


_OTHER_SETS = {kind: _reversing(kind) for kind in _SETS}


def _reversed(value: Any) -> Any:
    return next((other(value) for kind, other in _OTHER_SETS.items() if isinstance(value, kind)), value)


def with_sets_in_other_order(data: Any) -> None:
    """Reverse the sets that a data set holds, and those that its code makes."""
    for kind, other in _OTHER_SETS.items():
        patch(f"builtins.{kind.__name__}", other).start()
    for owner in list(parts_of(data)):
        if isinstance(owner, types.FunctionType):
            _replace(owner, _reversed)
            with suppress(OSError, SyntaxError, TypeError, ValueError):  # no source, or not as it was compiled
                _call_set(owner)
            continue
        if type(owner) is list:
            owner[:] = map(_reversed, owner)
            continue
        has_names = hasattr(owner, "__dict__") and not isinstance(owner, type)
        named = owner if type(owner) is dict else vars(owner) if has_names else {}
        named.update({name: _reversed(value) for name, value in named.items() if isinstance(value, _SETS)})


def _replace(function: types.FunctionType, replaced: Callable[[Any], Any]) -> None:
    """Replace values of the module's names that a function uses."""
    function.__globals__.update({name: replaced(value) for name, value in names_in_module(function)})


class _SetCalls(ast.NodeTransformer):
    def visit_SetComp(self, node: ast.SetComp) -> ast.AST:  # ast's name
        self.generic_visit(node)
        return self._called(ast.ListComp(node.elt, node.generators))

    def visit_Set(self, node: ast.Set) -> ast.AST:  # ast's name
        self.generic_visit(node)
        return self._called(ast.List(node.elts, ast.Load()))

    @staticmethod
    def _called(members: ast.expr) -> ast.Call:
        return ast.Call(ast.Name("set", ast.Load()), [members], [])


def _call_set(function: types.FunctionType) -> None:
    """Have ``{...}`` in a function of yours call ``set``, which is replaced."""
    code = function.__code__
    steps = {step.opname for each in code_in(code) for step in dis.get_instructions(each)}
    has_constant = any(isinstance(value, _SETS) for each in code_in(code) for value in each.co_consts)
    if is_of_library(code) or not (has_constant or steps & {"BUILD_SET", "SET_ADD"}):
        return
    [made] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    if not isinstance(made, ast.FunctionDef):
        return
    made.decorator_list = []
    # Around it, so that it finds the variables that it has from outside.
    [around] = ast.parse(f"def around({', '.join(code.co_freevars)}): pass").body
    around.body = [_SetCalls().visit(made)]  # type: ignore[attr-defined]  # ast.parse() of a `def`: a function has a body
    compiled = compile(ast.fix_missing_locations(ast.Module([around], [])), code.co_filename, "exec")
    function.__code__ = next(
        each for each in code_in(compiled) if each.co_name == code.co_name and each.co_freevars == code.co_freevars
    )


class _LaterTime(datetime, metaclass=_StandIn):
    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return super().now(tz) + timedelta(seconds=_LATER_SECONDS)

    @classmethod
    def utcnow(cls) -> Any:
        return super().utcnow() + timedelta(seconds=_LATER_SECONDS)

    @classmethod
    def today(cls) -> Any:
        return super().today() + timedelta(seconds=_LATER_SECONDS)


class _LaterDay(date, metaclass=_StandIn):
    @classmethod
    def today(cls) -> Any:
        return super().today() + timedelta(seconds=_LATER_SECONDS)


def with_later_clock(data: Any) -> None:
    """Move the clock forward, for code that asks Python's modules for it."""

    def later(clock: Callable[..., Any], seconds: int, *arguments: Any) -> Any:
        return clock(*arguments) + seconds

    def told(clock: Callable[..., Any], place: int, *arguments: Any) -> Any:
        if any(each is not None for each in arguments[place:]):
            return clock(*arguments)
        now = time.localtime if clock.__name__ in ("asctime", "strftime") else time.time
        return clock(*arguments[:place], now())

    moved: list[tuple[Any, Any]] = [(datetime, _LaterTime), (date, _LaterDay)]
    patch.multiple("datetime", datetime=_LaterTime, date=_LaterDay).start()
    for name in _CLOCKS:
        for suffix, unit in (("", 1), ("_ns", 10**9)):
            clock = getattr(time, name + suffix)
            moved.append((clock, partial(later, clock, _LATER_SECONDS * unit)))
            patch.object(time, name + suffix, moved[-1][1]).start()
    for name, place in _FORMATS.items():
        clock = getattr(time, name)
        moved.append((clock, partial(told, clock, place)))
        patch.object(time, name, moved[-1][1]).start()
    for owner in list(parts_of(data)):
        if isinstance(owner, types.FunctionType):
            _replace(owner, lambda value: next((new for old, new in moved if value is old), value))
