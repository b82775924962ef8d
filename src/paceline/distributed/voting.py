"""Votes that travel with the reduction of the gradients: they need no collective of their own.

There are three of them: whether to stop, whether to save, and whether a loss was no number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline.distributed.strategy import ControlFlags, FlagReader, Marks

VOTES = len(ControlFlags._fields) + 1


class _Ballot(torch.autograd.Function):
    """A zero whose gradient with respect to the votes is asked for when the backward pass comes to it."""

    @staticmethod
    def forward(ctx: Any, votes: torch.Tensor, voting: Voting) -> torch.Tensor:
        ctx.voting, ctx.dtype = voting, votes.dtype
        return votes.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.voting.computed is not None:
            # What is queued here is called once every gradient of this process is there. DDP's reducer queues its
            # waiting likewise, with the last gradient, which cannot come before the votes': so this is called first.
            torch.autograd.Variable._execution_engine.queue_callback(ctx.voting.computed)  # noqa: SLF001  # so does FSDP
        return ctx.voting.cast().to(ctx.dtype), None


class Voting(nn.Module):
    """The network plus one extra parameter whose gradient carries the votes through the reduction.

    Args:
        network: What a step calls.
        shape: The extra parameter's; its last size is the number of votes.
        like: The votes are on its device, and of its dtype.

    Attributes:
        cast: Gives the votes, in that shape.
        computed: Called in a backward pass that reduces, once this process has computed its part; on a device with
            streams, where the caller's stream has.
    """

    def __init__(self, network: Callable[..., Any], shape: tuple[int, ...], like: torch.Tensor) -> None:
        super().__init__()
        self.network = network
        self.votes = nn.Parameter(torch.zeros(shape, device=like.device, dtype=like.dtype))
        self.cast: Callable[[], torch.Tensor]
        self.computed: Callable[[], None] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, torch.Tensor | None]:
        """Return the network's answer and a zero to be added to the loss; None where there is no gradient."""
        # Of what is ready, the backward pass takes the newest first: what comes before the network comes last there.
        ballot = _Ballot.apply(self.votes, self) if torch.is_grad_enabled() else None
        return self.network(*args, **kwargs), ballot


class FlagExchange:
    """The votes of a run's steps: cast at the end of a backward pass, read when the reduction has added them up.

    Args:
        voting: What carries them, as the reduction knows it: where parameters are spread over processes, spread by now.
        device: Where they are.

    Attributes:
        votes: The parameter whose gradient they become; the network may hold a gathered one in its place for a while.
    """

    def __init__(self, voting: Voting, device: torch.device) -> None:
        self._voting = voting
        self.votes = voting.votes
        self._shape = voting.votes.shape
        self._no, self._yes = torch.zeros((), device=device), torch.ones((), device=device)
        self._marks = Marks()
        self._reader = FlagReader(device, count=len(ControlFlags._fields))
        self._ballot: torch.Tensor | None = None

    def take(self, given: tuple[Any, torch.Tensor | None]) -> Any:
        """Keep the ballot of a forward pass, and hand on the network's answer."""
        answer, ballot = given
        self._ballot = self._ballot if ballot is None else ballot
        return answer

    def with_vote(
        self, loss: torch.Tensor, ask: Callable[[], ControlFlags], *, is_last: bool, spoiled: torch.Tensor | None
    ) -> torch.Tensor:
        """Add zero to the loss; the votes, as they are at the end of the backward pass, are its gradient."""
        self._marks.add(spoiled, loss, is_last=is_last)
        if not is_last:
            return loss
        self.votes.grad = None
        self._voting.cast = lambda: torch.stack(
            [*(self._yes if each else self._no for each in ask()), self._marks.of_step]
        ).expand(self._shape)
        # Not kept: it would keep the network alive, in a circle that no garbage collector sees.
        ballot, self._ballot = self._ballot, None
        assert ballot is not None  # a loss comes of a forward pass
        return loss + ballot

    def spoiled(self, counted: torch.Tensor | None) -> torch.Tensor:
        """The mean of all processes' marks.

        Args:
            counted: The votes as the reduction gave them, [3].
        """
        assert counted is not None  # they are counted in a backward pass
        return counted[-1]

    def agreed(self, counted: torch.Tensor | None) -> ControlFlags:
        """Read the votes (late on a GPU, but equally late on every process)."""
        if counted is None:  # before the first step
            return ControlFlags()
        self._reader.cast(counted[:-1])
        return ControlFlags(*self._reader.agreed())
