"""Parallel strategies that keep replicas' weights equal, with one interface for one process and for many."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from paceline.errors import ModelError

# On a GPU the flags are read this many steps late, when their copy has long arrived, so that the host never waits.
VOTE_LAG = 2

Ids = NDArray[np.int64]
NO_SAMPLES: Ids = np.empty(0, dtype=np.int64)
_LAST = 1_000_000


class Heartbeat:
    """Position of this process: plain attributes that the loop writes and a thread reads, without locks.

    Attributes:
        step: The current step, counted from 1; 0 before the first.
        phase: The current phase of the step.
        order: Index of the phase; comparable between processes at the same step.
        ticks: Grows with any progress.
        is_new: Whether this is the first time in this phase; networks are compiled then.
        samples: The samples being processed.
    """

    __slots__ = ("_entered", "is_new", "order", "phase", "samples", "step", "ticks")

    def __init__(self) -> None:
        self.step, self.phase, self.order, self.ticks, self.is_new = 0, "start", 0, 0, True
        self.samples: Ids = NO_SAMPLES
        self._entered: set[str] = set()

    def begin_step(self, step: int) -> None:
        """Start a new step."""
        self.step, self.order = step, 0

    def enter(self, phase: str, *, last: bool = False, samples: Ids = NO_SAMPLES) -> None:
        """Start another phase.

        Args:
            phase: Its name.
            last: Whether it is the last one before processes synchronise; they may have reached it by different paths.
            samples: The samples being processed in it.
        """
        self.phase, self.samples = phase, samples
        self.order = _LAST if last else self.order + 1
        self.is_new = phase not in self._entered
        if self.is_new:
            self._entered.add(phase)
        self.ticks += 1

    def tick(self) -> None:
        """Report progress within a phase."""
        self.ticks += 1


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch's place in its step.

    Attributes:
        logical_rank: Its number among the step's micro-batches over all processes.
        step_weight: Total weight of the step over all processes: its samples, or their tokens.
        weight: Weight of the micro-batch; 0 for one that only matches the collectives of others.
        is_last: Whether it is the last one of the step on this process.
        logical_ranks: Micro-batches of the step over all processes; a multiple of their number.
        step_samples: Samples of the whole step, if that differs from its weight.
    """

    logical_rank: int
    step_weight: int
    weight: int
    is_last: bool = True
    logical_ranks: int = 1
    step_samples: int | None = None

    @property
    def filled(self) -> int:
        """Micro-batches of the step that have samples; they come first."""
        return min(self.logical_ranks, self.step_weight if self.step_samples is None else self.step_samples)


class ControlFlags(NamedTuple):
    """Requests of a rank, or those that all ranks agreed on after a step.

    Attributes:
        stop: Whether to stop after this step.
        save: Whether to save a checkpoint after this step.
    """

    stop: bool = False
    save: bool = False


class Stopwatch(Protocol):
    """Receives a strategy's timings; implemented by the step clock."""

    def span(self, phase: str) -> AbstractContextManager[None, None]:
        """Count the time inside as a phase of the step."""
        ...

    def switch(self, phase: str) -> None:
        """Count the time from here to the end of the span around it as another phase."""
        ...


class Strategy(abc.ABC):
    """The parallel strategy, as the step and the loop use it; the base class is a single process.

    Attributes:
        loss_divisor: Divisor that the reduction applies to its sum: the mean loss of a micro-batch must be multiplied
            by it and by the micro-batch's share of the step's samples.
        needs_warmup: Whether a batch must go through all replicas before the first step.
        is_sharded: Whether the weights are sharded: calls of the network, and copies of its state, are then
            collectives.
        model: The module that the step calls; wraps the network.
        eval_model: The module that evaluation calls; its submodules are the network's.
        blocking_phases: Phases of a step in which processes wait for one another, other than ``communication``.
        measures_communication: Whether it can separate waiting for other processes from computing.
    """

    blocking_phases: Collection[str] = ()
    measures_communication = True
    loss_divisor = 1
    needs_warmup = False
    is_sharded = False
    model: Callable[..., Any]
    eval_model: Callable[..., Any]

    def timed_by(self, stopwatch: Stopwatch) -> None:  # noqa: B027  # not all can tell, or wait
        """From now on, count the time in which the step waits for other processes as ``communication``."""

    def micro_batch(self, part: MicroBatch) -> AbstractContextManager[Any]:
        """Context for a micro-batch's forward and backward pass."""
        return _NULL_CONTEXT

    @abc.abstractmethod
    def with_vote(
        self,
        loss: torch.Tensor,
        get_flags: Callable[[], ControlFlags],
        *,
        is_last: bool,
        nonfinite: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Send control flags, and a mark on a loss, along with the gradient reduction.

        Args:
            loss: The loss that starts the backward pass.
            get_flags: Returns this process's flags; called as late in the step as possible.
            is_last: Whether it is the step's last micro-batch on this process.
            nonfinite: Above zero if the loss is not finite; on the loss's device.
        """

    def combine(self) -> torch.Tensor | None:
        """After the last micro-batch, reduce gradients over the processes, unless the passes already did.

        Returns:
            The step's sum of losses and its number of samples, [2], if they were reduced too.
        """
        return None

    @abc.abstractmethod
    def nonfinite(self) -> torch.Tensor:
        """After :meth:`combine`, return a device value above zero, on every process, if any marked a loss."""

    @abc.abstractmethod
    def agreed(self, flags: ControlFlags) -> ControlFlags:
        """Requests of all processes; the same answer on every process after the same step.

        Args:
            flags: This process's current flags, which take effect at once in a single process.
        """

    def sync_buffers(self, modules: list[nn.Module]) -> None:  # noqa: B027  # most keep them the same
        """Broadcast buffers (BatchNorm statistics) from the first rank, before they are scored or saved."""


class Replicas(Strategy):
    """A strategy with a complete replica on every process, which can be called and changed between steps."""

    def no_reduction(self) -> AbstractContextManager[Any]:
        """Context for passes outside of training steps: nothing is reduced or kept."""
        return _NULL_CONTEXT

    def update_trainable(self) -> None:
        """React, between two steps, to a change in which parameters require a gradient."""


def refuse_unused(network: nn.Module, *, allowed: bool) -> None:
    """After a backward pass, check that all trainable parameters have a gradient.

    Raises:
        ModelError: Naming those without one, unless that is allowed.
    """
    unused = [name for name, each in network.named_parameters() if each.requires_grad and each.grad is None]
    if unused and not allowed:
        raise ModelError(
            f"{len(unused)} parameter(s) did not contribute to the loss: {', '.join(unused[:_MAX_LISTED])}"
            f"{', …' if len(unused) > _MAX_LISTED else ''}; freeze them (model.frozen), use them, or set "
            "parallel.unused_parameters=allow."
        )


_NULL_CONTEXT = nullcontext()
_MAX_LISTED = 5


class NonfiniteTracker:
    """Tracks this process's largest mark on a loss of the step, on the device."""

    def __init__(self) -> None:
        self.value = torch.zeros(())
        self._is_new = True

    def add(self, mark: torch.Tensor | None, loss: torch.Tensor, *, is_last: bool) -> None:
        """Add a micro-batch's mark; the first one after a step's last starts a new step."""
        if mark is None:
            mark = torch.zeros((), device=loss.device)
        self.value = mark if self._is_new else torch.maximum(self.value, mark)
        self._is_new = is_last


class SingleProcess(Replicas):
    """The strategy of a single process, which has nothing to agree on."""

    def __init__(self, forward_fn: Callable[..., Any], network: nn.Module, *, allows_unused: bool = False) -> None:
        self.model = self.eval_model = forward_fn
        self._nonfinite = NonfiniteTracker()
        self._unchecked: nn.Module | None = None if allows_unused else network

    def combine(self) -> None:
        """Combine nothing; after the first step, check that every parameter has a gradient."""
        if self._unchecked is not None:
            refuse_unused(self._unchecked, allowed=False)
            self._unchecked = None

    def with_vote(
        self,
        loss: torch.Tensor,
        get_flags: Callable[[], ControlFlags],
        *,
        is_last: bool,
        nonfinite: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the mark; the loss is unchanged."""
        self._nonfinite.add(nonfinite, loss, is_last=is_last)
        return loss

    def nonfinite(self) -> torch.Tensor:
        """Return the largest mark of this step."""
        return self._nonfinite.value

    def agreed(self, flags: ControlFlags) -> ControlFlags:
        """Return this process's own flags."""
        return flags


class DeviceEvent(Protocol):
    """The methods that are used of a device event."""

    def record(self) -> None:
        """Record the work queued on the device so far."""

    def synchronize(self) -> None:
        """Wait until the device has completed the recorded work."""


class FlagReader:
    """Reads the sums of all processes' flags: at once on a CPU; on other devices two steps late, without waiting.

    Args:
        device: Device of the flags.
        count: Flags per step.
        make_slot: Creates a host tensor of ``count`` numbers that the device can copy to, and an event; by default
            page-locked memory and the device's own events.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        count: int = 1,
        make_slot: Callable[[], tuple[torch.Tensor, DeviceEvent]] | None = None,
    ) -> None:
        self._device = device
        self._count = count
        self._make_slot = make_slot or self._page_locked
        self._lag = 0 if device.type == "cpu" and make_slot is None else VOTE_LAG
        # Slots are allocated once and reused in rotation: page-locking memory is slow.
        self._ring: list[tuple[torch.Tensor, DeviceEvent]] = []
        self._cast = 0
        self._newest = torch.zeros(count)

    def push(self, votes: torch.Tensor) -> None:
        """Add a step's flags, a tensor of ``count`` numbers."""
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
        """Return for each flag whether any process raised it in the latest readable step; False before there is one."""
        votes = self._newest
        if self._lag:
            if self._cast <= self._lag:
                return (False,) * self._count
            # The oldest slot, which the next flags will reuse.
            votes, arrived = self._ring[self._cast % len(self._ring)]
            arrived.synchronize()
        return tuple(vote > 0 for vote in votes.tolist())

    def _page_locked(self) -> tuple[torch.Tensor, DeviceEvent]:
        return torch.empty(self._count, pin_memory=True), torch.get_device_module(self._device).Event()
