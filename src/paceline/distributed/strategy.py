"""How do replicas keep the same weights? Verbs for the step, the same with one process as with many."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from paceline.distributed.collectives import Collectives

# torch 2.14 renamed the switch.
_DDP_PARAMETERS = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
_WITHOUT_BUFFER_SYNC: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _DDP_PARAMETERS else "broadcast_buffers": False
}

# On a GPU the vote is read this many steps late, when its copy has long arrived, so that the host never waits.
_VOTE_LAG = 2


class Strategy(Protocol):
    """What the step and the loop need to know of parallel work."""

    @property
    def model(self) -> Callable[..., Any]:
        """What the step calls; wraps the network."""
        ...

    def gradient_sync(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Around a micro-batch: gradients are averaged over processes in the last one only."""
        ...

    def with_vote(self, loss: torch.Tensor, *, stop: bool, is_last: bool) -> torch.Tensor:
        """Let a stop request ride on the gradient reduction that happens anyway."""
        ...

    def agreed_stop(self) -> bool:
        """Whether any process voted to stop; the same answer on every process after the same step."""
        ...

    def sync_buffers(self, modules: list[nn.Module]) -> None:
        """Make buffers (BatchNorm statistics) the first rank's, before they are scored or saved."""
        ...


class SingleProcess:
    """One process: nothing to agree on."""

    def __init__(self, network: nn.Module) -> None:
        self.model = network
        self._stop = False

    def gradient_sync(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Nothing to reduce."""
        return nullcontext()

    def with_vote(self, loss: torch.Tensor, *, stop: bool, is_last: bool) -> torch.Tensor:
        """Remember the request; the loss is unchanged."""
        self._stop = stop
        return loss

    def agreed_stop(self) -> bool:
        """This process's own request."""
        return self._stop

    def sync_buffers(self, modules: list[nn.Module]) -> None:
        """Nothing to copy."""


class _Voting(nn.Module):
    """The network plus one extra parameter whose gradient carries the stop vote through DDP's reduction."""

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.network = network
        self.vote = nn.Parameter(torch.zeros(1, device=device))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.network(*args, **kwargs)


class DataParallel:
    """torch's DistributedDataParallel: one replica per process, gradients averaged bucket by bucket.

    Buffers are not broadcast in every forward pass, as DDP does by default: each rank's BatchNorm follows its
    own micro-batches, and the first rank's statistics become everyone's when they are scored or saved.
    """

    def __init__(
        self, network: nn.Module, collectives: Collectives, device: torch.device, *, bucket_cap_mb: int
    ) -> None:
        self._voting = _Voting(network, device)
        self._collectives = collectives
        self._ayes = torch.ones(1, device=device)
        self._device = device
        self._pending: list[tuple[torch.Tensor, Any]] = []
        self.model = nn.parallel.DistributedDataParallel(
            self._voting,
            device_ids=[device.index] if device.index is not None else None,
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=True,
            **_WITHOUT_BUFFER_SYNC,
        )

    def gradient_sync(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """DDP reduces in the last micro-batch's backward pass."""
        return nullcontext() if is_last else self.model.no_sync()

    def with_vote(self, loss: torch.Tensor, *, stop: bool, is_last: bool) -> torch.Tensor:
        """Add ``vote * flag``: zero to the loss, and the flag is the vote parameter's gradient."""
        if not is_last:
            return loss
        vote = self._voting.vote
        vote.grad = None
        return loss + (vote * (self._ayes if stop else self._ayes.new_zeros(1))).sum()

    def agreed_stop(self) -> bool:
        """Read the reduced vote (late on a GPU, but equally late on every rank)."""
        gradient = self._voting.vote.grad
        if gradient is None:  # before the first step
            return False
        if self._device.type == "cpu":
            return gradient.item() > 0
        copy = torch.empty(1, pin_memory=True).copy_(gradient.detach(), non_blocking=True)
        arrived = torch.get_device_module(self._device).Event()
        arrived.record()
        self._pending.append((copy, arrived))
        if len(self._pending) <= _VOTE_LAG:
            return False
        vote, arrived = self._pending.pop(0)
        arrived.synchronize()
        return vote.item() > 0

    def sync_buffers(self, modules: list[nn.Module]) -> None:
        """Broadcast every buffer from the first rank."""
        for module in modules:
            self._collectives.broadcast_tensors(module.buffers())


def build_strategy(
    name: str, network: nn.Module, collectives: Collectives, device: torch.device, *, bucket_cap_mb: int
) -> Strategy:
    """The strategy the plan chose."""
    if name == "ddp":
        return DataParallel(network, collectives, device, bucket_cap_mb=bucket_cap_mb)
    return SingleProcess(network)
