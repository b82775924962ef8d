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
_BUFFER_SYNC = "forward_sync_buffers" if "forward_sync_buffers" in _DDP_PARAMETERS else "broadcast_buffers"

# Layers whose running statistics are used in evaluation only, and what they are called.
_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})

# On a GPU the vote is read this many steps late, when its copy has long arrived, so that the host never waits.
VOTE_LAG = 2


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


def has_training_buffers(network: nn.Module) -> bool:
    """Whether a buffer may take part in training: any but the running statistics of torch's own norms."""
    return any(
        not (isinstance(module, _NORMS) and name in _STATISTICS)
        for module in network.modules()
        for name, _ in module.named_buffers(recurse=False)
    )


class Arrival(Protocol):
    """What is used of a device's event."""

    def record(self) -> None:
        """Note that what was asked of the device up to here is to be waited for."""

    def synchronize(self) -> None:
        """Wait until the device has done it."""


class VoteReader:
    """Reads the sum of all processes' votes: at once on a CPU; on other devices two steps late, without waiting.

    Args:
        device: Where the votes are.
        make_slot: Makes a host tensor of one number that the device can copy to, and an event; page-locked memory and
            the device's own events unless given.
    """

    def __init__(
        self, device: torch.device, make_slot: Callable[[], tuple[torch.Tensor, Arrival]] | None = None
    ) -> None:
        self._device = device
        self._make_slot = make_slot or self._page_locked
        self._lag = 0 if device.type == "cpu" and make_slot is None else VOTE_LAG
        # Slots are made once and used in turn: page-locking memory is slow.
        self._ring: list[tuple[torch.Tensor, Arrival]] = []
        self._cast = 0
        self._newest: torch.Tensor | None = None

    def cast(self, vote: torch.Tensor) -> None:
        """Take a step's vote, a tensor of one number."""
        self._newest = vote.detach()
        if not self._lag:
            return
        if len(self._ring) <= self._lag:
            self._ring.append(self._make_slot())
        copy, copied = self._ring[self._cast % len(self._ring)]
        copy.copy_(self._newest.reshape(1), non_blocking=True)
        copied.record()
        self._cast += 1

    def agreed(self) -> bool:
        """Whether anyone voted to stop in the step that can be known by now; False before there is one."""
        if not self._lag:
            return self._newest is not None and self._newest.item() > 0
        if self._cast <= self._lag:
            return False
        # The oldest slot, and so the one that the next vote takes.
        vote, arrived = self._ring[self._cast % len(self._ring)]
        arrived.synchronize()
        return vote.item() > 0

    def _page_locked(self) -> tuple[torch.Tensor, Arrival]:
        return torch.empty(1, pin_memory=True), torch.get_device_module(self._device).Event()


class DataParallel:
    """torch's DistributedDataParallel: one replica per process, gradients averaged bucket by bucket.

    DDP's broadcast of buffers before a step's first forward pass is off for networks whose only buffers are the
    norms' running statistics: each rank's then follow its own micro-batches, and the first rank's become everyone's
    when they are scored or saved. Other buffers may decide what is learned: they are the first rank's at each step,
    so that neither evaluating nor saving can change them.
    """

    def __init__(
        self, network: nn.Module, collectives: Collectives, device: torch.device, *, bucket_cap_mb: int
    ) -> None:
        self._voting = _Voting(network, device)
        self._collectives = collectives
        self._ayes = torch.ones(1, device=device)
        self._votes = VoteReader(device)
        self._synced: list[nn.Module] = []
        self.model = nn.parallel.DistributedDataParallel(
            self._voting,
            device_ids=[device.index] if device.index is not None else None,
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=True,
            **{_BUFFER_SYNC: has_training_buffers(network)},  # type: ignore[arg-type]  # a name known only here
        )

    def gradient_sync(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """DDP reduces in the last micro-batch's backward pass."""
        return nullcontext() if is_last else self.model.no_sync()

    def with_vote(self, loss: torch.Tensor, *, stop: bool, is_last: bool) -> torch.Tensor:
        """Add ``vote * flag``: zero to the loss, and the flag is the vote parameter's gradient."""
        self._synced = []
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
        self._votes.cast(gradient)
        return self._votes.agreed()

    def sync_buffers(self, modules: list[nn.Module]) -> None:
        """Broadcast every buffer from the first rank; once, if nothing is trained in between."""
        if modules != self._synced:
            self._collectives.broadcast_tensors(buffer for module in modules for buffer in module.buffers())
        self._synced = list(modules)


def build_strategy(
    name: str, network: nn.Module, collectives: Collectives, device: torch.device, *, bucket_cap_mb: int
) -> Strategy:
    """The strategy the plan chose."""
    if name == "ddp":
        return DataParallel(network, collectives, device, bucket_cap_mb=bucket_cap_mb)
    return SingleProcess(network)
