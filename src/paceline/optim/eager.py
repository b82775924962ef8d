"""Optimizers whose methods do not load torch's compiler.

torch disables ``torch.compile`` in some optimizer methods, and inserts a graph break around ``step``. Both load
``torch._dynamo`` at the first call, and with it sympy and torch.distributed.tensor. That is much of the time to the
first step, in every process, for a compiler that never compiles an optimizer here. The wrapped methods work without the
wrappers.
"""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

import torch

_Kind = TypeVar("_Kind", bound=torch.optim.Optimizer)

_made: dict[type, Any] = {}


class EagerOptimizer(torch.optim.Optimizer):
    """A base class for optimizers that are never compiled."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


_METHODS = tuple(name for name in vars(EagerOptimizer) if not name.startswith("__"))


def eager(kind: type[_Kind]) -> type[_Kind]:
    """Return a class of the same name, rule, state and hooks whose methods do not load the compiler.

    Args:
        kind: A class of torch or another library. A class that overrides such a method is returned unchanged; so is the
            ``step`` of a class outside torch.
    """
    if any(getattr(kind, name) is not getattr(torch.optim.Optimizer, name) for name in _METHODS):
        return kind
    if kind not in _made:
        body: dict[str, Any] = {"__module__": kind.__module__, "__doc__": kind.__doc__}
        if kind.__module__.startswith("torch.optim."):
            body["step"] = torch.no_grad()(inspect.unwrap(kind.step))
        _made[kind] = type(kind.__name__, (EagerOptimizer, kind), body)
    subclass: type[_Kind] = _made[kind]
    return subclass
