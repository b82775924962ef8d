"""Replicas kept equal by torch's DistributedDataParallel (DDP)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from paceline.distributed.collectives import Collectives
from paceline.distributed.strategy import MicroBatch, Replicas, Stopwatch
from paceline.distributed.voting import VOTES, Voting, VotingStrategy
from paceline.recipe.running import Parallel

# torch 2.14 renamed the option.
_DDP_PARAMETERS = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
BUFFER_SYNC = "forward_sync_buffers" if "forward_sync_buffers" in _DDP_PARAMETERS else "broadcast_buffers"

# Layers whose running statistics are used only in evaluation, and the names of those buffers.
_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})


# These hooks send and sum a bucket in another dtype; the control flags, zeros and ones, survive that.
_COMPRESSIONS: dict[str, Callable[..., Any]] = {
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
}


def has_training_buffers(network: nn.Module) -> bool:
    """Whether a buffer may take part in training: all except the running statistics of torch's own norms."""
    return any(
        not (isinstance(module, _NORMS) and name in _STATISTICS)
        for module in network.modules()
        for name, _ in module.named_buffers(recurse=False)
    )


class DataParallel(VotingStrategy, Replicas):
    """torch's DistributedDataParallel: one replica per process, gradients averaged bucket by bucket.

    DDP's broadcast of buffers before a step's first forward pass is off for networks whose only buffers are the norms'
    running statistics: each rank's then follow its own micro-batches, and the first rank's are broadcast before they
    are scored or saved. Other buffers may affect training: the first rank's are broadcast at each step, so that neither
    evaluating nor saving changes them.
    """

    def __init__(
        self,
        network: nn.Module,
        forward_fn: Callable[..., Any],
        collectives: Collectives,
        device: torch.device,
        *,
        parallel: Parallel,
    ) -> None:
        super().__init__(collectives, device)
        has_buffers = has_training_buffers(network)
        # DDP broadcasts them from the first process at the start of a step's first forward pass.
        self.blocking_phases = ("forward",) if has_buffers else ()
        self.needs_warmup = collectives.world.world_size > 1
        self._attach(Voting(forward_fn, (VOTES,), torch.empty((), device=device)))
        self.eval_model = forward_fn
        self._options: dict[str, Any] = {
            "device_ids": [device.index] if device.index is not None else None,
            "bucket_cap_mb": parallel.bucket_cap_mb,
            "gradient_as_bucket_view": True,
            # The network is already the same on all processes (see build_run), and its average was copied from it;
            # later each process keeps its own norms' statistics.
            "init_sync": False,
            "static_graph": parallel.static_graph,
            # A static graph determines which parameters are unused.
            "find_unused_parameters": parallel.unused_parameters == "allow" and not parallel.static_graph,
            BUFFER_SYNC: has_buffers,
        }
        self._compression = parallel.gradient_compression
        self._replica = self._wrap()

    def _wrap(self) -> nn.parallel.DistributedDataParallel:
        wrapped = nn.parallel.DistributedDataParallel(self._voting, **self._options)
        if self._compression != "none":
            wrapped.register_comm_hook(None, _COMPRESSIONS[self._compression])
        return wrapped

    def update_trainable(self) -> None:
        """Wrap the network again: DDP decides at construction which parameters' gradients it waits for."""
        # The old wrapper would continue to count gradients until it is collected.
        self._replica._remove_autograd_hooks()  # type: ignore[no-untyped-call]  # noqa: SLF001  # torch has no other way
        self._replica = self._wrap()

    def timed_by(self, stopwatch: Stopwatch) -> None:
        """Time the wait for other processes: from the last computed gradient to the end of the backward pass.

        Reduction that overlaps the pass does not count, because it is hidden.
        """
        self._voting.on_backward_done = partial(stopwatch.switch, "communication")

    def model(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network through DDP."""
        return self._keep_ballot(self._replica(*args, **kwargs))

    def micro_batch(self, part: MicroBatch) -> AbstractContextManager[Any]:
        """DDP reduces in the last micro-batch's backward pass."""
        return nullcontext() if part.is_last else self._replica.no_sync()

    def no_reduction(self) -> AbstractContextManager[Any]:
        """DDP reduces nothing."""
        return self._replica.no_sync()
