"""timm's optimizers by the names that its own factory has for them: ``of_timm.nadamw(groups, lr=…, **options)``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch


def __getattr__(name: str) -> Callable[..., torch.optim.Optimizer]:
    from timm.optim import create_optimizer_v2, list_optimizers

    if name not in list_optimizers():
        raise AttributeError(f"timm {name!r}")
    return partial(create_optimizer_v2, opt=name)
