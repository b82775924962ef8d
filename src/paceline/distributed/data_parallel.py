"""How do replicas keep the same weights by torch's own means, at the speed of its collectives?"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from paceline.distributed.collectives import Collectives
from paceline.distributed.strategy import Marks, MicroBatch, VoteReader, Wish

# torch 2.14 renamed the switch.
_DDP_PARAMETERS = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
_BUFFER_SYNC = "forward_sync_buffers" if "forward_sync_buffers" in _DDP_PARAMETERS else "broadcast_buffers"

# Layers whose running statistics are used in evaluation only, and what they are called.
_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})


class _Voting(nn.Module):
    """The network plus one extra parameter whose gradient carries the votes through DDP's reduction.

    There are three: whether to stop, whether to save, and whether a loss was no number.
    """

    def __init__(self, network: Callable[..., Any], device: torch.device) -> None:
        super().__init__()
        self.network = network
        self.vote = nn.Parameter(torch.zeros(3, device=device))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.network(*args, **kwargs)


def has_training_buffers(network: nn.Module) -> bool:
    """Whether a buffer may take part in training: any but the running statistics of torch's own norms."""
    return any(
        not (isinstance(module, _NORMS) and name in _STATISTICS)
        for module in network.modules()
        for name, _ in module.named_buffers(recurse=False)
    )


class DataParallel:
    """torch's DistributedDataParallel: one replica per process, gradients averaged bucket by bucket.

    DDP's broadcast of buffers before a step's first forward pass is off for networks whose only buffers are the
    norms' running statistics: each rank's then follow its own micro-batches, and the first rank's become everyone's
    when they are scored or saved. Other buffers may decide what is learned: they are the first rank's at each step,
    so that neither evaluating nor saving can change them.
    """

    def __init__(
        self,
        network: nn.Module,
        called: Callable[..., Any],
        collectives: Collectives,
        device: torch.device,
        *,
        bucket_cap_mb: int,
    ) -> None:
        self.averages_over = collectives.world.world_size
        self.is_rehearsed = collectives.world.world_size > 1
        self._voting = _Voting(called, device)
        self._collectives = collectives
        self._no, self._yes = torch.zeros((), device=device), torch.ones((), device=device)
        self._marks = Marks()
        self._votes = VoteReader(device, count=len(Wish._fields))
        self._synced: list[nn.Module] = []
        self.model = nn.parallel.DistributedDataParallel(
            self._voting,
            device_ids=[device.index] if device.index is not None else None,
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=True,
            **{_BUFFER_SYNC: has_training_buffers(network)},  # type: ignore[arg-type]  # a name known only here
        )

    def micro_batch(self, part: MicroBatch) -> AbstractContextManager[Any]:
        """DDP reduces in the last micro-batch's backward pass."""
        return nullcontext() if part.is_last else self.model.no_sync()

    def combine(self) -> None:
        """DDP's hooks have done it."""

    def with_vote(
        self, loss: torch.Tensor, wish: Wish, *, is_last: bool, spoiled: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add ``vote * flags``: zero to the loss, and the flags are the vote parameter's gradient."""
        self._synced = []
        self._marks.add(spoiled, loss, is_last=is_last)
        if not is_last:
            return loss
        vote = self._voting.vote
        vote.grad = None
        flags = [self._yes if each else self._no for each in wish]
        return loss + (vote * torch.stack([*flags, self._marks.of_step])).sum()

    def spoiled(self) -> torch.Tensor:
        """The mean of all processes' marks."""
        gradient = self._voting.vote.grad
        assert gradient is not None  # there is one after a backward pass
        return gradient[-1]

    def agreed(self, wish: Wish) -> Wish:
        """Read the reduced votes (late on a GPU, but equally late on every rank)."""
        gradient = self._voting.vote.grad
        if gradient is None:  # before the first step
            return Wish()
        self._votes.cast(gradient[:-1])
        return Wish(*self._votes.agreed())

    def sync_buffers(self, modules: list[nn.Module]) -> None:
        """Broadcast every buffer from the first rank; once, if nothing is trained in between."""
        if modules != self._synced:
            self._collectives.broadcast_tensors(buffer for module in modules for buffer in module.buffers())
        self._synced = list(modules)
