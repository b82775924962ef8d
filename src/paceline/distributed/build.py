"""Build the parallel strategy of a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline.distributed.collectives import Collectives
from paceline.distributed.data_parallel import DataParallel
from paceline.distributed.exact import ExactDataParallel
from paceline.distributed.strategy import SingleProcess, Strategy
from paceline.plan import Plan
from paceline.recipe.running import Parallel


def build_strategy(
    plan: Plan,
    network: nn.Module,
    forward_fn: Callable[..., Any],
    collectives: Collectives,
    device: torch.device,
    *,
    parallel: Parallel,
    average: nn.Module | None = None,
    value_of: Callable[[str], torch.Tensor] | None = None,
) -> Strategy:
    """Build the strategy the plan chose.

    Args:
        plan: Names the strategy.
        network: The bare network, with the same weights and buffers on every process.
        forward_fn: The callable that a step uses: the network, compiled if requested.
        collectives: The processes.
        device: The network's device.
        parallel: How gradients are reduced and weights are sharded.
        average: The average of the network's weights, if there is one.
        value_of: The initial values, by name, of a network without values; None for one that has them.
    """
    if plan.strategy == "exact":
        return ExactDataParallel(network, forward_fn, collectives)
    if plan.strategy == "ddp":
        return DataParallel(network, forward_fn, collectives, device, parallel=parallel)
    if plan.strategy == "fsdp":
        # Imported only where used: it is slow to import.
        from paceline.distributed.fully_sharded import FullySharded

        return FullySharded(network, forward_fn, average, collectives, device, parallel=parallel, value_of=value_of)
    return SingleProcess(forward_fn, network, allows_unused=parallel.unused_parameters == "allow")
