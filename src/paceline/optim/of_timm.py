"""timm's optimizers by the names that its own factory has for them: ``of_timm.nadamw(groups, lr=…, **options)``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch


def __getattr__(name: str) -> Callable[..., torch.optim.Optimizer]:
    timm: Any = import_module("timm.optim")  # whose types do not export what it exports
    if name not in timm.list_optimizers():
        raise AttributeError(f"timm has no optimizer {name!r}")
    return partial(timm.create_optimizer_v2, opt=name)
