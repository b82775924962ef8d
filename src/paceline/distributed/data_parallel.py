"""How do replicas keep the same weights by torch's own means, at the speed of its collectives?"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from paceline.distributed.collectives import Collectives
from paceline.distributed.strategy import Marks, MicroBatch, VoteReader, Wish
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


class _Ballot(torch.autograd.Function):
    """A zero whose gradient with respect to the votes is asked for when the backward pass comes to it."""

    @staticmethod
    def forward(ctx: Any, votes: torch.Tensor, voting: _Voting) -> torch.Tensor:
        ctx.voting = voting
        return votes.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.voting.cast(), None


class _Voting(nn.Module):
    """The network plus one extra parameter whose gradient carries the votes through DDP's reduction.

    There are three: whether to stop, whether to save, and whether a loss was no number.

    Attributes:
        cast: Gives the votes, [3].
        ballot: A zero to be added to the loss; None before a forward pass.
    """

    def __init__(self, network: Callable[..., Any], device: torch.device) -> None:
        super().__init__()
        self.network = network
        self.votes = nn.Parameter(torch.zeros(3, device=device))
        self.cast: Callable[[], torch.Tensor]
        self.ballot: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Of what is ready, the backward pass takes the newest first: what comes before the network comes last there.
        if torch.is_grad_enabled():
            self.ballot = _Ballot.apply(self.votes, self)
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
        parallel: Parallel,
    ) -> None:
        self.averages_over = collectives.world.world_size
        self.is_rehearsed = collectives.world.world_size > 1
        self._voting = _Voting(called, device)
        self._collectives = collectives
        self._no, self._yes = torch.zeros((), device=device), torch.ones((), device=device)
        self._marks = Marks()
        self._votes = VoteReader(device, count=len(Wish._fields))
        self._synced: list[nn.Module] = []
        self._options: dict[str, Any] = {
            "device_ids": [device.index] if device.index is not None else None,
            "bucket_cap_mb": parallel.bucket_cap_mb,
            "gradient_as_bucket_view": True,
            _BUFFER_SYNC: has_training_buffers(network),
        }
        self._compression = parallel.gradient_compression
        self.model = self._wrapped()

    def _wrapped(self, *, init_sync: bool = True) -> nn.parallel.DistributedDataParallel:
        wrapped = nn.parallel.DistributedDataParallel(self._voting, init_sync=init_sync, **self._options)
        if self._compression != "none":
            wrapped.register_comm_hook(None, _COMPRESSIONS[self._compression])
        return wrapped

    def gradients_changed(self) -> None:
        """Wrap the network anew: DDP waits for the gradients of those parameters that need one when it is built."""
        # The old one would go on counting gradients until it is collected.
        self.model._remove_autograd_hooks()  # type: ignore[no-untyped-call]  # noqa: SLF001  # torch has no other way
        # Parameters are the same everywhere, and each process keeps its own norms' statistics.
        self.model = self._wrapped(init_sync=False)

    def micro_batch(self, part: MicroBatch) -> AbstractContextManager[Any]:
        """DDP reduces in the last micro-batch's backward pass."""
        return nullcontext() if part.is_last else self.model.no_sync()

    def combine(self) -> None:
        """DDP's hooks have done it."""

    def with_vote(
        self, loss: torch.Tensor, ask: Callable[[], Wish], *, is_last: bool, spoiled: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add zero to the loss; the votes, as they are at the end of the backward pass, are its gradient."""
        self._synced = []
        self._marks.add(spoiled, loss, is_last=is_last)
        if not is_last:
            return loss
        self._voting.votes.grad = None
        self._voting.cast = lambda: torch.stack(
            [*(self._yes if each else self._no for each in ask()), self._marks.of_step]
        )
        # Not kept: it would keep the network alive, in a circle that no garbage collector sees.
        ballot, self._voting.ballot = self._voting.ballot, None
        assert ballot is not None  # a loss comes of a forward pass
        return loss + ballot

    def spoiled(self) -> torch.Tensor:
        """The mean of all processes' marks."""
        gradient = self._voting.votes.grad
        assert gradient is not None  # there is one after a backward pass
        return gradient[-1]

    def agreed(self, wish: Wish) -> Wish:
        """Read the reduced votes (late on a GPU, but equally late on every rank)."""
        gradient = self._voting.votes.grad
        if gradient is None:  # before the first step
            return Wish()
        self._votes.cast(gradient[:-1])
        return Wish(*self._votes.agreed())

    def sync_buffers(self, modules: list[nn.Module]) -> None:
        """Broadcast every buffer from the first rank; once, if nothing is trained in between."""
        if modules != self._synced:
            self._collectives.broadcast_tensors(buffer for module in modules for buffer in module.buffers())
        self._synced = list(modules)
