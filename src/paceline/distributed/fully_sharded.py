"""Fully sharded data parallelism (FSDP), for networks whose replica would not fit a device.

torch's FSDP2 (``fully_shard``; Zhao et al. 2023, after ZeRO-3, Rajbhandari et al. 2019): every parameter, its gradient,
its optimizer state and its average are sharded along their first dimension. A block's weights are gathered for its
forward pass, and again for its backward pass, after which each process receives its shard of the gradient. Gradients
are reduced at every micro-batch, so that no process ever holds a complete gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from paceline.distributed.collectives import Collectives
from paceline.distributed.data_parallel import has_training_buffers
from paceline.distributed.sharding import ValueOf, WeightInitializer, modules_to_shard, sharding_options
from paceline.distributed.strategy import MicroBatch
from paceline.distributed.voting import VOTES, Voting, VotingStrategy
from paceline.recipe.running import Parallel


class FullySharded(VotingStrategy):
    """Applies torch's ``fully_shard`` block by block.

    Args:
        network: The bare network, the same on every process; from here on a process's parameters are its shards.
        forward_fn: The callable that a step uses: the network, compiled if requested.
        average: The average of its weights, sharded like them; None without one.
        collectives: The processes.
        device: The network's device.
        parallel: How many processes share a copy, and what is gathered.
        value_of: The initial values of a network, and of an average, that have none yet; None if they have.
    """

    # Also when gradients are clipped, or sharded values are summed.
    blocking_phases = ("forward", "backward", "optimizer")
    # torch's hooks gather and wait in the middle of both passes.
    measures_communication = False
    needs_warmup = True
    is_sharded = True

    def __init__(
        self,
        network: nn.Module,
        forward_fn: Callable[..., Any],
        average: nn.Module | None,
        collectives: Collectives,
        device: torch.device,
        *,
        parallel: Parallel,
        value_of: ValueOf | None = None,
    ) -> None:
        super().__init__(collectives, device)
        mesh = _mesh(parallel, device, collectives.world.world_size)
        options = sharding_options(parallel, mesh)
        # An average has no backward pass, so gathered weights need not be kept.
        average_options = options | {"reshard_after_forward": True}
        self._is_new_step = True
        for parameter in (*network.parameters(), *(() if average is None else average.parameters())):
            # Only contiguous tensors can be sharded; convolutions convert a gathered filter to the batch's memory
            # format.
            parameter.data = parameter.data.contiguous()
        initialize = WeightInitializer(value_of, network, average, collectives, device)
        for name, module in modules_to_shard(network, parallel).items():
            initialize(name)
            # Autocast's 16-bit copies of the block's weights: kept, they would add up to a whole network.
            module.register_forward_hook(lambda *_: torch.clear_autocast_cache())
            fully_shard(module, **options)
            if average is not None:
                fully_shard(average.get_submodule(name), **average_options)
        initialize("")
        # Everything except parameters is complete on every process.
        self._training_buffers = list(network.buffers()) if has_training_buffers(network) else []
        # One row per process of a copy: after the reduction each process holds one row, and so all flags.
        voting = Voting(forward_fn, (mesh.size(mesh.ndim - 1), VOTES), next(network.parameters()).detach())
        fully_shard(voting, **options)
        self._attach(voting)
        self.eval_model = _EvaluationNetwork(voting, must_reshard=not parallel.reshard_after_forward)
        if average is not None:
            fully_shard(average, **average_options)

    def model(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network through FSDP."""
        return self._keep_ballot(self._voting(*args, **kwargs))

    def micro_batch(self, part: MicroBatch) -> AbstractContextManager[Any]:
        """Broadcast buffers that take part in training from the first process at each step, as DDP does."""
        if self._is_new_step:
            self._collectives.broadcast_tensors(self._training_buffers)
        self._is_new_step = part.is_last
        return nullcontext()

    def _reduced_votes(self) -> torch.Tensor | None:
        gradient: Any = self._votes.grad
        return None if gradient is None else gradient.to_local()[0]


class _EvaluationNetwork(nn.Module):
    """The network as evaluation calls it.

    Args:
        voting: The module wrapped by FSDP.
        must_reshard: Whether gathered weights stay for a backward pass. Here there is none, so they are released.
    """

    def __init__(self, voting: Voting, *, must_reshard: bool) -> None:
        super().__init__()
        self.voting = voting
        self._must_reshard = must_reshard

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network."""
        output, _ = self.voting(*args, **kwargs)
        if self._must_reshard:
            for module in self.voting.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        return output


def _mesh(parallel: Parallel, device: torch.device, world_size: int) -> DeviceMesh:
    size = world_size if parallel.shard_size == "all" else parallel.shard_size
    if size == world_size:
        return init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (world_size // size, size), mesh_dim_names=("replicate", "shard"))
