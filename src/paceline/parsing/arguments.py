"""Arguments of the functions that programs call: every mistake in one is a single sentence."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import CheckpointError, DataError, PacelineError, RunDirectoryError

_SHOWN = str | int | float | None


def whole(name: str, value: Any, least: int = 0, *, error: type[PacelineError] = DataError) -> int:
    """Return a whole number, also one of NumPy or torch, as int.

    Raises:
        PacelineError: Of the class ``error``, if it is not one, or less than ``least``.
    """
    try:
        found = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = None
    if found is None or found < least:
        rule = f"a whole number from {least}"
        raise error(f"{name} is {shown(value)}; give {rule}.", key=name, value=value, rule=rule)
    return found


def folder(name: str, value: Any, *, error: type[PacelineError] = RunDirectoryError) -> Path:
    """Return a path.

    Raises:
        PacelineError: Of the class ``error``, if it is not text or a ``Path``.
    """
    try:
        return Path(value).expanduser()
    except TypeError:
        raise error(f"{name} is {shown(value)}; give a path.", key=name, value=value) from None


def tensor(name: str, value: Any, device: torch.device | None = None, *, error: type[PacelineError]) -> Tensor:
    """Return numbers or truth values as a tensor without gradient; does not wait for the device.

    Raises:
        PacelineError: Of the class ``error``, if they are something else.
    """
    try:
        found = torch.as_tensor(value, device=device).detach()
    except (TypeError, ValueError, RuntimeError):
        if isinstance(value, Tensor):  # the device failed
            raise
        found = None
    if found is None or found.is_complex():
        raise error(f"{name} is {shown(value)}; give numbers or truth values.", key=name, value=value)
    return found


def check_made(name: str, value: Any, *, error: type[PacelineError]) -> None:
    """Check that a module or optimizer has what its base class makes.

    Raises:
        PacelineError: Of the class ``error``, if its ``__init__`` does not call that of the base class.
    """
    made = {nn.Module: "_parameters", Optimizer: "_optimizer_step_post_hooks"}
    if any(isinstance(value, kind) and attribute not in vars(value) for kind, attribute in made.items()):
        call = "super().__init__(parameters, {'lr': lr})" if isinstance(value, Optimizer) else "super().__init__()"
        raise error(f"{name}: {type(value).__name__}.__init__ does not call {call}; call it first.", key=name)


def shown(value: Any) -> str:
    """Return a number or text as Python writes it, and for any other object its class."""
    if isinstance(value, _SHOWN):
        return repr(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def checked_step(state: Any, whose: str) -> int:
    """Return the step of a small part's saved state.

    Raises:
        CheckpointError: If it has none.
    """
    step = state.get("step") if isinstance(state, Mapping) else None
    if type(step) is not int or step < 0:
        raise CheckpointError(f"The state of {whose} has step={step!r}: give one that it has returned.", value=step)
    return step
