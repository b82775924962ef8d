"""Replicas kept equal by torch's own means (DDP), at the speed of its collectives."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from paceline.distributed.collectives import Collectives
from paceline.distributed.strategy import ControlFlags, MicroBatch, Stopwatch
from paceline.distributed.voting import VOTES, FlagExchange, Voting
from paceline.recipe.running import Parallel

# torch 2.14 renamed the switch.
_DDP_PARAMETERS = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
_BUFFER_SYNC = "forward_sync_buffers" if "forward_sync_buffers" in _DDP_PARAMETERS else "broadcast_buffers"

# Layers whose running statistics are used in evaluation only, and what they are called.
_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})


# They send a bucket in another dtype and add it up there; the votes, zeros and ones, survive that.
_COMPRESSIONS: dict[str, Callable[..., Any]] = {
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
}


def has_training_buffers(network: nn.Module) -> bool:
    """Whether a buffer may take part in training: any but the running statistics of torch's own norms."""
    return any(
        not (isinstance(module, _NORMS) and name in _STATISTICS)
        for module in network.modules()
        for name, _ in module.named_buffers(recurse=False)
    )


class Buffers:
    """Buffers that each process moves by itself in training, and that become the first one's now and then."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._synced: list[nn.Module] = []

    def moved(self) -> None:
        """There was a forward pass in training."""
        self._synced = []

    def sync(self, modules: list[nn.Module]) -> None:
        """Broadcast those of some modules, if they have moved since; a collective."""
        if modules != self._synced:
            self._collectives.broadcast_tensors(buffer for module in modules for buffer in module.buffers())
        self._synced = list(modules)


class DataParallel:
    """torch's DistributedDataParallel: one replica per process, gradients averaged bucket by bucket.

    DDP's broadcast of buffers before a step's first forward pass is off for networks whose only buffers are the
    norms' running statistics: each rank's then follow its own micro-batches, and the first rank's become everyone's
    when they are scored or saved. Other buffers may decide what is learned: they are the first rank's at each step,
    so that neither evaluating nor saving can change them.
    """

    tells_communication = True
    is_sharded = False

    def __init__(
        self,
        network: nn.Module,
        called: Callable[..., Any],
        collectives: Collectives,
        device: torch.device,
        *,
        parallel: Parallel,
    ) -> None:
        has_buffers = has_training_buffers(network)
        # DDP makes them the first process's where a step's first forward pass begins.
        self.waits_in: Collection[str] = ("forward",) if has_buffers else ()
        self.averages_over = collectives.world.world_size
        self.is_rehearsed = collectives.world.world_size > 1
        self._voting = Voting(called, (VOTES,), torch.empty((), device=device))
        self._exchange = FlagExchange(self._voting, device)
        self._collectives = collectives
        self._buffers = Buffers(collectives)
        self.scored = called
        self._options: dict[str, Any] = {
            "device_ids": [device.index] if device.index is not None else None,
            "bucket_cap_mb": parallel.bucket_cap_mb,
            "gradient_as_bucket_view": True,
            # The network is everyone's already (see build_run), and its average was copied from it; later on, each
            # process keeps its own norms' statistics.
            "init_sync": False,
            "static_graph": parallel.static_graph,
            # A static graph tells which they are.
            "find_unused_parameters": parallel.unused_parameters == "allow" and not parallel.static_graph,
            _BUFFER_SYNC: has_buffers,
        }
        self._compression = parallel.gradient_compression
        self._replica = self._wrapped()

    def _wrapped(self) -> nn.parallel.DistributedDataParallel:
        wrapped = nn.parallel.DistributedDataParallel(self._voting, **self._options)
        if self._compression != "none":
            wrapped.register_comm_hook(None, _COMPRESSIONS[self._compression])
        return wrapped

    def gradients_changed(self) -> None:
        """Wrap the network anew: DDP waits for the gradients of those parameters that need one when it is built."""
        # The old one would go on counting gradients until it is collected.
        self._replica._remove_autograd_hooks()  # type: ignore[no-untyped-call]  # noqa: SLF001  # torch has no other way
        self._replica = self._wrapped()

    def timed_by(self, stopwatch: Stopwatch) -> None:
        """From where a backward pass has computed all gradients to its end, it waits for the others'.

        What is reduced beside the pass counts as nothing: it is hidden.
        """
        self._voting.computed = partial(stopwatch.switch, "communication")

    def model(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network through DDP."""
        return self._exchange.take(self._replica(*args, **kwargs))

    def micro_batch(self, part: MicroBatch) -> AbstractContextManager[Any]:
        """DDP reduces in the last micro-batch's backward pass."""
        return nullcontext() if part.is_last else self._replica.no_sync()

    def aside(self) -> AbstractContextManager[Any]:
        """DDP reduces nothing."""
        return self._replica.no_sync()

    def combine(self) -> None:
        """DDP's hooks have done it."""

    def with_vote(
        self, loss: torch.Tensor, ask: Callable[[], ControlFlags], *, is_last: bool, spoiled: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add zero to the loss; the votes are its gradient."""
        self._buffers.moved()
        return self._exchange.with_vote(loss, ask, is_last=is_last, spoiled=spoiled)

    def spoiled(self) -> torch.Tensor:
        """The mean of all processes' marks."""
        return self._exchange.spoiled(self._exchange.votes.grad)

    def agreed(self, flags: ControlFlags) -> ControlFlags:
        """Read the reduced votes (late on a GPU, but equally late on every rank)."""
        return self._exchange.agreed(self._exchange.votes.grad)

    def sync_buffers(self, modules: list[nn.Module]) -> None:
        """Broadcast every buffer from the first rank; once, if nothing is trained in between."""
        self._buffers.sync(modules)
