"""Strategies that keep replicas' weights equal: verbs for the step, the same for one process as for many."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from paceline.errors import ModelError

# On a GPU the vote is read this many steps late, when its copy has long arrived, so that the host never waits.
VOTE_LAG = 2


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch's place in its step.

    Attributes:
        logical_rank: Its number among the step's micro-batches over all processes.
        step_weight: What the whole step weighs over all processes: its samples, or their tokens.
        weight: What the micro-batch weighs; 0 for one that is only there to match others' collectives.
        is_last: Whether it is the last one of the step on this process.
        logical_ranks: Micro-batches of the step over all processes; a multiple of their number.
        step_samples: Samples of the whole step, where that is not their weight.
    """

    logical_rank: int
    step_weight: int
    weight: int
    is_last: bool = True
    logical_ranks: int = 1
    step_samples: int | None = None

    @property
    def filled(self) -> int:
        """Micro-batches of the step that have samples: the first ones."""
        return min(self.logical_ranks, self.step_weight if self.step_samples is None else self.step_samples)


class ControlFlags(NamedTuple):
    """Requests of a rank, or those that all ranks agreed on after a step.

    Attributes:
        stop: To stop after this step.
        save: To save a checkpoint after this step.
    """

    stop: bool = False
    save: bool = False


class Stopwatch(Protocol):
    """What a strategy reports its time to; the step clock."""

    def span(self, phase: str) -> AbstractContextManager[None, None]:
        """Count the time inside as a phase of the step."""
        ...

    def switch(self, phase: str) -> None:
        """Count the time from here to the end of the span around it as another phase."""
        ...


class Strategy(abc.ABC):
    """The parallel strategy, as the step and the loop use it; the base class is a single process.

    Attributes:
        averages_over: By how much the reduction divides what it has summed: the mean loss of a micro-batch is to be
            multiplied by it, and by the micro-batch's share of the step's samples.
        is_rehearsed: Whether a batch must go through all replicas before the first step.
        is_sharded: Whether each process holds a part of the weights: whoever calls the network, or copies its state,
            does so on all of them.
        model: What the step calls; wraps the network.
        scored: What evaluation calls; its modules are the network's.
        waits_in: Phases of a step in which processes wait for one another, other than ``communication``.
        tells_communication: Whether it can tell the time in which a step waits for other processes from computing.
    """

    waits_in: Collection[str] = ()
    tells_communication = True
    averages_over = 1
    is_rehearsed = False
    is_sharded = False
    model: Callable[..., Any]
    scored: Callable[..., Any]

    def timed_by(self, stopwatch: Stopwatch) -> None:  # noqa: B027  # not all can tell, or wait
        """From here on, count the time in which the step waits for other processes as ``communication``."""

    def micro_batch(self, part: MicroBatch) -> AbstractContextManager[Any]:
        """Context for a micro-batch's forward and backward pass."""
        return _NOTHING

    @abc.abstractmethod
    def with_vote(
        self, loss: torch.Tensor, ask: Callable[[], ControlFlags], *, is_last: bool, spoiled: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Let control flags, and a mark on a loss, ride on the gradient reduction that happens anyway.

        Args:
            loss: What the backward pass begins with.
            ask: Tells what this process asks for; called as late in the step as it can still be heard.
            is_last: Whether it is the step's last micro-batch on this process.
            spoiled: Above zero if the loss is no number; on the loss's device.
        """

    def combine(self) -> torch.Tensor | None:
        """After the last micro-batch: make gradients the step's on every process, where the passes have not.

        Returns:
            The step's sum of losses and its number of samples, [2], if they were combined as well.
        """
        return None

    @abc.abstractmethod
    def spoiled(self) -> torch.Tensor:
        """After :meth:`combine`: above zero on every process if any marked a loss of this step; on the device."""

    @abc.abstractmethod
    def agreed(self, flags: ControlFlags) -> ControlFlags:
        """Requests of all processes; the same answer on every process after the same step.

        Args:
            flags: What this process asks for by now, which counts at once if it is alone.
        """

    def sync_buffers(self, modules: list[nn.Module]) -> None:  # noqa: B027  # most keep them the same
        """Make buffers (BatchNorm statistics) the first rank's, before they are scored or saved."""


class Replicas(Strategy):
    """A strategy with the whole network on every process, which can therefore be called and changed between steps."""

    def aside(self) -> AbstractContextManager[Any]:
        """Around passes that belong to no step: nothing is reduced, and nothing kept."""
        return _NOTHING

    def gradients_changed(self) -> None:
        """Take note, between two steps, that other parameters of the network need a gradient than before."""


def refuse_unused(network: nn.Module, *, allowed: bool) -> None:
    """After a backward pass: see to it that all trainable parameters have a gradient.

    Raises:
        ModelError: With the names of those that have none, unless that is allowed.
    """
    unused = [name for name, each in network.named_parameters() if each.requires_grad and each.grad is None]
    if unused and not allowed:
        raise ModelError(
            f"{len(unused)} parameter(s) did not contribute to the loss: {', '.join(unused[:_NAMED])}"
            f"{', …' if len(unused) > _NAMED else ''}; freeze them (model.frozen), use them, or set "
            "parallel.unused_parameters=allow."
        )


_NOTHING = nullcontext()
_NAMED = 5


class Marks:
    """This process's largest mark on a loss of the step, kept on the device."""

    def __init__(self) -> None:
        self.of_step = torch.zeros(())
        self._is_new = True

    def add(self, mark: torch.Tensor | None, loss: torch.Tensor, *, is_last: bool) -> None:
        """Take a micro-batch's mark; the one after a step's last begins a new step."""
        if mark is None:
            mark = torch.zeros((), device=loss.device)
        self.of_step = mark if self._is_new else torch.maximum(self.of_step, mark)
        self._is_new = is_last


class SingleProcess(Replicas):
    """A single process: nothing to agree on."""

    def __init__(self, called: Callable[..., Any], network: nn.Module, *, allows_unused: bool = False) -> None:
        self.model = self.scored = called
        self._marks = Marks()
        self._unchecked: nn.Module | None = None if allows_unused else network

    def combine(self) -> None:
        """Combine nothing; after the first step, check that every parameter has a gradient."""
        if self._unchecked is not None:
            refuse_unused(self._unchecked, allowed=False)
            self._unchecked = None

    def with_vote(
        self, loss: torch.Tensor, ask: Callable[[], ControlFlags], *, is_last: bool, spoiled: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Store the mark; the loss is unchanged."""
        self._marks.add(spoiled, loss, is_last=is_last)
        return loss

    def spoiled(self) -> torch.Tensor:
        """The largest mark of this step."""
        return self._marks.of_step

    def agreed(self, flags: ControlFlags) -> ControlFlags:
        """This process's own flags."""
        return flags


class Arrival(Protocol):
    """What is used of a device's event."""

    def record(self) -> None:
        """Note that what was asked of the device up to here is to be waited for."""

    def synchronize(self) -> None:
        """Wait until the device has done it."""


class FlagReader:
    """Reads the sums of all processes' flags: at once on a CPU; on other devices two steps late, without waiting.

    Args:
        device: Where the votes are.
        count: Votes per step.
        make_slot: Makes a host tensor of ``count`` numbers that the device can copy to, and an event; page-locked
            memory and the device's own events unless given.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        count: int = 1,
        make_slot: Callable[[], tuple[torch.Tensor, Arrival]] | None = None,
    ) -> None:
        self._device = device
        self._count = count
        self._make_slot = make_slot or self._page_locked
        self._lag = 0 if device.type == "cpu" and make_slot is None else VOTE_LAG
        # Slots are made once and used in turn: page-locking memory is slow.
        self._ring: list[tuple[torch.Tensor, Arrival]] = []
        self._cast = 0
        self._newest = torch.zeros(count)

    def cast(self, votes: torch.Tensor) -> None:
        """Take a step's votes, a tensor of ``count`` numbers."""
        self._newest = votes.detach().reshape(self._count)
        if not self._lag:
            return
        if len(self._ring) <= self._lag:
            self._ring.append(self._make_slot())
        copy, copied = self._ring[self._cast % len(self._ring)]
        copy.copy_(self._newest, non_blocking=True)
        copied.record()
        self._cast += 1

    def agreed(self) -> tuple[bool, ...]:
        """For each vote, whether anyone cast it in the step that can be known by now; False before there is one."""
        votes = self._newest
        if self._lag:
            if self._cast <= self._lag:
                return (False,) * self._count
            # The oldest slot, and so the one that the next votes take.
            votes, arrived = self._ring[self._cast % len(self._ring)]
            arrived.synchronize()
        return tuple(vote > 0 for vote in votes.tolist())

    def _page_locked(self) -> tuple[torch.Tensor, Arrival]:
        return torch.empty(self._count, pin_memory=True), torch.get_device_module(self._device).Event()
