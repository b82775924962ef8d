"""timm's optimizers by their names in timm's factory: ``of_timm.nadamw(groups, lr=…, **options)``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch


def __getattr__(name: str) -> Callable[..., torch.optim.Optimizer]:
    timm: Any = import_module("timm.optim")  # its type stubs do not export what the module exports
    if name not in timm.list_optimizers():
        raise AttributeError(f"timm has no optimizer {name!r}")
    return partial(timm.create_optimizer_v2, opt=name)
