"""Bit-identical replicas, with results that do not depend on their number.

The step's work is cut into a fixed number of logical ranks. Each leaves its share of the gradient, of the change of
every buffer (BatchNorm statistics) and of the loss in one flat leaf; leaves are added along a tree whose shape is that
number's alone (:mod:`paceline.distributed.reduction_tree`). A process adds up what it can of its own logical ranks,
which leaves it few partial sums; then every process gets one slice of everyone's partial sums, finishes the tree for
its slice, and hands the result to all: as many bytes as a ring's all-reduce moves, and no process holds every leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from paceline.distributed.collectives import Collectives
from paceline.distributed.reduction_tree import Node, PartialSums, nodes_of, total
from paceline.distributed.strategy import ControlFlags, FlagReader, MicroBatch, Replicas, Stopwatch

# BatchNorm counts its forward passes in it; one per step wherever they happen.
_COUNTER = "num_batches_tracked"


def buffers_of(network: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Every buffer once, with the module that holds it and its name there."""
    seen: set[int] = set()
    for module in network.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if id(buffer) not in seen:
                seen.add(id(buffer))
                yield module, name, buffer


@contextmanager
def buffers_kept(network: nn.Module) -> Iterator[None]:
    """After passes that are no steps, also after an error: every buffer is where it was, with what it was."""
    places = [(*place, place[-1].clone()) for place in buffers_of(network)]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, before in places:
                put_back(module, name, buffer)
                buffer.copy_(before)


def put_back(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Bring a buffer's value into the tensor that held it, where a forward pass has put another in its place."""
    now = getattr(module, name)
    if now is not tensor:
        with torch.no_grad():
            tensor.copy_(now)
        setattr(module, name, tensor)


class StepBuffers:
    """A network's buffers from the beginning of a step to its end.

    Numbers that forward passes move (running statistics) end as they were plus the weighted mean of their changes.
    Others, whose differences mean nothing (integers, flags, complex numbers, and what holds infinities when the
    network is built, as a mask does), end as logical rank 0 has left them.

    Attributes:
        summed: The buffers whose changes are added up.
    """

    def __init__(self, network: nn.Module, collectives: Collectives) -> None:
        self._places = list(buffers_of(network))
        self._all = [tensor for _, _, tensor in self._places]
        self._before = [torch.empty_like(tensor) for tensor in self._all]
        numbers = [each.is_floating_point() and bool(each.isfinite().all()) for each in self._all]
        self.summed = [tensor for tensor, is_number in zip(self._all, numbers, strict=True) if is_number]
        self._summed_before = [was for was, is_number in zip(self._before, numbers, strict=True) if is_number]
        self._led = [tensor for tensor, is_number in zip(self._all, numbers, strict=True) if not is_number]
        self._led_after = [torch.empty_like(each) for each in self._led]
        self._is_told = any(
            name != _COUNTER for (_, name, _), is_number in zip(self._places, numbers, strict=True) if not is_number
        )
        self._collectives = collectives

    def begin(self) -> None:
        """Remember where the step starts."""
        _copy(self._before, self._all)

    def start_again(self) -> None:
        """Give the next logical rank what the step started from."""
        _copy(self._all, self._before)

    def leave(self, logical_rank: int, changes: list[Tensor], share: float) -> None:
        """Write a logical rank's share of the changes into ``changes``, in the order of :attr:`summed`."""
        self.put_back()
        if self.summed:
            _copy(changes, self.summed)
            torch._foreach_sub_(changes, self._summed_before)
            torch._foreach_mul_(changes, share)
        if logical_rank == 0:
            _copy(self._led_after, self._led)

    def put_back(self) -> None:
        """Undo that a forward pass has put another tensor in a buffer's place; its value stays."""
        for module, name, tensor in self._places:
            put_back(module, name, tensor)

    def end(self, changes: list[Tensor]) -> None:
        """Make the buffers the step's; a collective for networks with buffers that logical rank 0 decides."""
        if self.summed:
            _copy(self.summed, self._summed_before)
            torch._foreach_add_(self.summed, changes)
        if self._is_told:
            if self._collectives.world.is_first:
                _copy(self._led, self._led_after)
            self._collectives.broadcast_tensors(self._led)


def _copy(targets: list[Tensor], sources: list[Any]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)


_LOSS, _SAMPLES, _STOP, _SAVE, _SPOILED = range(5)
_WISH = slice(_STOP, _SAVE + 1)

# torch 2.14 renamed it.
_gather: Callable[..., Any] = getattr(torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor)


class GradientSlot:
    """Everything of one logical rank, or of several added up, that the step sums over logical ranks.

    Attributes:
        parts: One flat tensor per data type, and last the notes: losses, samples, votes and marks of
            losses that are no numbers, float64.
        gradients: Views into ``parts``, shaped like the parameters.
        changes: Views into ``parts``, shaped like the floating-point buffers.
    """

    def __init__(self, parameters: list[torch.Tensor], buffers: list[torch.Tensor], *, slices: int) -> None:
        tensors = [*parameters, *buffers]
        views: dict[int, torch.Tensor] = {}
        self.parts: list[torch.Tensor] = []
        for dtype in dict.fromkeys(each.dtype for each in tensors):
            numbers = [number for number, each in enumerate(tensors) if each.dtype == dtype]
            ends = list(accumulate(tensors[number].numel() for number in numbers))
            flat = torch.zeros(_round_up(ends[-1], slices), dtype=dtype, device=tensors[0].device)
            for number, end in zip(numbers, ends, strict=True):
                views[number] = _shaped(flat[end - tensors[number].numel() : end], tensors[number])
            self.parts.append(flat)
        exact = torch.float32 if tensors[0].device.type == "mps" else torch.float64
        self.notes = torch.zeros(_round_up(5, slices), dtype=exact, device=tensors[0].device)
        self.parts.append(self.notes)
        self.gradients = [views[number] for number in range(len(parameters))]
        self.changes = [views[number] for number in range(len(parameters), len(tensors))]

    def zero(self) -> None:
        """Forget what was there."""
        for part in self.parts:
            part.zero_()

    def add(self, other: GradientSlot) -> GradientSlot:
        """Add another leaf to this one."""
        for mine, theirs in zip(self.parts, other.parts, strict=True):
            mine.add_(theirs)
        return self


def _shaped(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    # With the tensor's own strides (channels last, say): optimizers are fastest where gradients have them too.
    dense = torch.empty_like(like).stride() == like.stride()
    return flat.as_strided(like.shape, like.stride()) if dense else flat.view(like.shape)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


class ExactDataParallel(Replicas):
    """Replicas whose results are bit-identical for any number of them.

    Args:
        network: The bare network.
        called: What the step calls: the network, compiled if asked.
        collectives: The processes.
    """

    is_rehearsed = True

    def __init__(self, network: nn.Module, called: Callable[..., Any], collectives: Collectives) -> None:
        self.model = self.scored = called
        self._world = collectives.world
        self._logical_ranks = 1
        # Leaves have room for all that will ever be trained; what is frozen meanwhile stays zero, and is dropped.
        self._parameters = [each for each in network.parameters() if each.requires_grad]
        self._buffers = StepBuffers(network, collectives)
        self._sums: PartialSums[GradientSlot] = PartialSums(GradientSlot.add)
        self._leaf = self._make_leaf()
        self._free = [self._leaf]
        self._combined: GradientSlot | None = None
        self._leaves = 0
        self._begun = False
        self._ask: Callable[[], ControlFlags] = ControlFlags
        self._votes = FlagReader(self._leaf.notes.device, count=len(ControlFlags._fields))
        self._span: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()

    def timed_by(self, stopwatch: Stopwatch) -> None:
        """The exchange is waited for; adding up is computing."""
        self._span = stopwatch.span

    @contextmanager
    def micro_batch(self, part: MicroBatch) -> Iterator[None]:
        """Collect one logical rank's leaf; every one starts from the buffers the step started from."""
        if self._begun:
            self._buffers.start_again()
        else:
            self._begin(part)
        self._leaf = self._free.pop() if self._free else self._make_leaf()
        self._leaf.zero()
        for parameter, gradient in zip(self._parameters, self._leaf.gradients, strict=True):
            parameter.grad = gradient
        yield
        if part.logical_rank >= self._leaves:  # it has no samples, and is there in vain
            self._buffers.put_back()
            self._free.append(self._leaf)
            return
        if part.weight:
            self._leaf.notes[_LOSS] *= part.step_weight
        else:  # its images could all not be read; a mean over nothing is no number
            self._leaf.notes[_LOSS] = 0
        self._leaf.notes[_SAMPLES] = part.weight
        self._buffers.leave(part.logical_rank, self._leaf.changes, part.weight / part.step_weight)
        self._free += self._sums.push(part.logical_rank, self._leaf)

    def with_vote(
        self, loss: torch.Tensor, ask: Callable[[], ControlFlags], *, is_last: bool, spoiled: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Note the loss's share and the mark beside the gradient; the loss is unchanged."""
        self._ask = ask
        self._leaf.notes[_LOSS] = loss.detach()
        if spoiled is not None:
            self._leaf.notes[_SPOILED] = spoiled
        return loss

    def spoiled(self) -> torch.Tensor:
        """The sum of all logical ranks' marks."""
        assert self._combined is not None
        return self._combined.notes[_SPOILED]

    def combine(self) -> torch.Tensor:
        """Make gradients and buffers the step's, on every process; returns its losses and samples."""
        held = self._sums.take()
        self._vote(held)
        self._combined = combined = self._exchange(held)
        for parameter, gradient in zip(self._parameters, combined.gradients, strict=True):
            # One that was frozen since must not decay either.
            parameter.grad = gradient if parameter.requires_grad else None
        self._buffers.end(combined.changes)
        self._begun = False
        self._votes.cast(combined.notes[_WISH])
        return combined.notes[:_STOP].clone()

    def agreed(self, flags: ControlFlags) -> ControlFlags:
        """What any process wished for; the same answer on every process after the same step."""
        return ControlFlags(*self._votes.agreed())

    def _begin(self, part: MicroBatch) -> None:
        self._buffers.begin()
        if self._combined is not None:
            self._free.append(self._combined)
            self._combined = None
        self._logical_ranks = part.logical_ranks
        self._leaves = part.filled
        self._begun = True

    def _make_leaf(self) -> GradientSlot:
        return GradientSlot(
            [each.detach() for each in self._parameters], self._buffers.summed, slices=self._world.world_size
        )

    def _vote(self, held: Mapping[Node, GradientSlot]) -> None:
        """Note this process's flags in one of its leaves; one without samples has none, and waits for a step with."""
        flags = self._ask()
        for leaf in list(held.values())[:1]:
            if flags.stop:
                leaf.notes[_STOP] = 1
            if flags.save:
                leaf.notes[_SAVE] = 1

    def _exchange(self, held: dict[Node, GradientSlot]) -> GradientSlot:
        """Finish the tree; over several processes, each for its slice, and then put the slices together."""
        if self._world.world_size == 1:
            combined = total(held, GradientSlot.add, leaves=self._leaves)
            self._free += [leaf for leaf in held.values() if leaf is not combined]
            return combined
        with self._span("communication"):
            slices = [
                self._own_slices(part, [leaf.parts[part] for leaf in held.values()])
                for part in range(len(self._leaf.parts))
            ]
        self._free += held.values()
        combined = self._free.pop() if self._free else self._make_leaf()
        for part, nodes in enumerate(slices):
            mine = total(nodes, torch.Tensor.add_, leaves=self._leaves)
            with self._span("communication"):
                _gather(combined.parts[part], mine)
        return combined

    def _own_slices(self, part: int, held: list[torch.Tensor]) -> dict[Node, torch.Tensor]:
        """Swap slices of one part: this process's slice of every process's partial sums, by node."""
        like = self._leaf.parts[part]
        size = like.numel() // self._world.world_size
        per_process = self._logical_ranks // self._world.world_size
        everyones = [
            nodes_of(min(first, self._leaves), min(first + per_process, self._leaves))
            for first in range(0, self._logical_ranks, per_process)
        ]
        received: dict[Node, torch.Tensor] = {}
        for turn in range(max(len(nodes) for nodes in everyones)):
            givers = [nodes[turn] for nodes in everyones if turn < len(nodes)]
            output = like.new_empty(size * len(givers))
            torch.distributed.all_to_all_single(
                output,
                held[turn] if turn < len(held) else like.new_empty(0),
                [size if turn < len(nodes) else 0 for nodes in everyones],
                [size if turn < len(held) else 0] * self._world.world_size,
            )
            received.update(zip(givers, torch.split(output, size), strict=True))
        return received
