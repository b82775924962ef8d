"""Which strategy keeps the replicas of a plan together?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline.distributed.collectives import Collectives
from paceline.distributed.data_parallel import DataParallel
from paceline.distributed.exact import ExactDataParallel
from paceline.distributed.strategy import SingleProcess, Strategy
from paceline.recipe.plan import Plan
from paceline.recipe.running import Parallel


def build_strategy(
    plan: Plan,
    network: nn.Module,
    called: Callable[..., Any],
    collectives: Collectives,
    device: torch.device,
    *,
    parallel: Parallel,
) -> Strategy:
    """Build the strategy the plan chose.

    Args:
        plan: Says which.
        network: The bare network.
        called: What a step calls: the network, compiled if asked.
        collectives: The processes.
        device: Where the network is.
        parallel: How DDP is to send gradients.
    """
    if plan.strategy == "exact":
        return ExactDataParallel(network, called, collectives)
    if plan.strategy == "ddp":
        return DataParallel(network, called, collectives, device, parallel=parallel)
    return SingleProcess(called)
