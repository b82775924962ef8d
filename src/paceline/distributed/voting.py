"""Control flags ("votes") that are reduced along with the gradients, without an extra collective.

There are three of them: whether to stop, whether to save, and whether a loss was not finite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline.distributed.collectives import Collectives
from paceline.distributed.strategy import ControlFlags, FlagReader, NonfiniteTracker, Strategy

VOTES = len(ControlFlags._fields) + 1


class _Ballot(torch.autograd.Function):
    """A zero whose gradient with respect to the votes is evaluated when the backward pass reaches it."""

    @staticmethod
    def forward(ctx: Any, votes: torch.Tensor, voting: Voting) -> torch.Tensor:
        ctx.voting, ctx.dtype = voting, votes.dtype
        return votes.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.voting.on_backward_done is not None:
            # The callback queued here runs once every gradient of this process is computed. DDP's reducer queues its
            # wait in the same way with the last gradient, which cannot come before the votes': so this one runs first.
            torch.autograd.Variable._execution_engine.queue_callback(ctx.voting.on_backward_done)  # noqa: SLF001  # no public way; FSDP uses it too
        return ctx.voting.get_votes().to(ctx.dtype), None


class Voting(nn.Module):
    """The network plus one extra parameter whose gradient carries the votes through the reduction.

    Args:
        network: The callable that a step uses.
        shape: Shape of the extra parameter; its last size is the number of votes.
        template: The votes are on its device, and of its dtype.

    Attributes:
        get_votes: Returns the votes, in that shape.
        on_backward_done: Called in a backward pass that reduces, once this process has computed its part; on a device
            with streams, once the caller's stream has.
    """

    def __init__(self, network: Callable[..., Any], shape: tuple[int, ...], template: torch.Tensor) -> None:
        super().__init__()
        self.network = network
        self.votes = nn.Parameter(torch.zeros(shape, device=template.device, dtype=template.dtype))
        self.get_votes: Callable[[], torch.Tensor]
        self.on_backward_done: Callable[[], None] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, torch.Tensor | None]:
        """Return the network's answer and a zero to add to the loss; None without gradients."""
        # The backward pass processes the newest ready node first: what precedes the network comes last there.
        ballot = _Ballot.apply(self.votes, self) if torch.is_grad_enabled() else None
        return self.network(*args, **kwargs), ballot


class VotingStrategy(Strategy):
    """A strategy whose reduction of gradients carries the votes: cast at the end of a backward pass, and read later.

    Buffers that each process updates separately in training are broadcast from the first one before they are scored or
    saved.
    """

    def __init__(self, collectives: Collectives, device: torch.device) -> None:
        self.loss_divisor = collectives.world.world_size
        self._collectives = collectives
        self._synced: list[nn.Module] = []
        self._no, self._yes = torch.zeros((), device=device), torch.ones((), device=device)
        self._nonfinite = NonfiniteTracker()
        self._reader = FlagReader(device, count=len(ControlFlags._fields))
        self._ballot: torch.Tensor | None = None

    def _attach(self, voting: Voting) -> None:
        """Set the parameter that carries the votes, as the reduction sees it: sharded if parameters are sharded."""
        self._voting = voting
        # The network may temporarily hold a gathered one in its place.
        self._votes = voting.votes
        self._shape = voting.votes.shape

    def _keep_ballot(self, output: tuple[Any, torch.Tensor | None]) -> Any:
        """Store the ballot of a forward pass, and return the network's answer."""
        result, ballot = output
        self._ballot = self._ballot if ballot is None else ballot
        return result

    def with_vote(
        self,
        loss: torch.Tensor,
        get_flags: Callable[[], ControlFlags],
        *,
        is_last: bool,
        nonfinite: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Add zero to the loss; the votes at the end of the backward pass are its gradient."""
        self._synced = []  # a training forward pass came before
        self._nonfinite.add(nonfinite, loss, is_last=is_last)
        if not is_last:
            return loss
        self._votes.grad = None
        self._voting.get_votes = lambda: torch.stack(
            [*(self._yes if each else self._no for each in get_flags()), self._nonfinite.value]
        ).expand(self._shape)
        # Not kept: it would keep the network alive, in a reference cycle that the garbage collector cannot see.
        ballot, self._ballot = self._ballot, None
        assert ballot is not None  # a loss always follows a forward pass
        return loss + ballot

    def nonfinite(self) -> torch.Tensor:
        """Return the mean of all processes' marks."""
        votes = self._reduced_votes()
        assert votes is not None  # set in a backward pass
        return votes[-1]

    def agreed(self, flags: ControlFlags) -> ControlFlags:
        """Read the reduced votes (late on a GPU, but equally late on every process)."""
        votes = self._reduced_votes()
        if votes is None:  # before the first step
            return ControlFlags()
        self._reader.push(votes[:-1])
        return ControlFlags(*self._reader.agreed())

    def sync_buffers(self, modules: list[nn.Module]) -> None:
        """Broadcast every buffer from the first process; only once if nothing is trained in between."""
        if modules != self._synced:
            self._collectives.broadcast_tensors(buffer for module in modules for buffer in module.buffers())
        self._synced = list(modules)

    def _reduced_votes(self) -> torch.Tensor | None:
        """The votes from the last reduction, [3]."""
        return self._votes.grad
