"""Exact data parallelism: bit-identical results for any number of replicas.

A step is split into a fixed number of logical ranks. Each stores its share of the gradient, of the change of every
buffer (BatchNorm statistics) and of the loss in one flat leaf. Leaves are summed along a tree whose shape depends only
on that number (:mod:`paceline.distributed.reduction_tree`). A process first sums its own logical ranks as far as the
tree allows, which leaves few partial sums. Then every process receives one slice of all partial sums, finishes the tree
for its slice, and sends the result to all. This moves as many bytes as a ring all-reduce, and no process holds every
leaf.
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

# BatchNorm's count of forward passes; it grows by one per step, wherever the passes run.
_COUNTER = "num_batches_tracked"


def buffers_of(network: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield every buffer once, with the module that holds it and its name there."""
    seen: set[int] = set()
    for module in network.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if id(buffer) not in seen:
                seen.add(id(buffer))
                yield module, name, buffer


@contextmanager
def buffers_kept(network: nn.Module) -> Iterator[None]:
    """Context for passes outside of training steps: restores every buffer's tensor and values, also after an error."""
    places = [(*place, place[-1].clone()) for place in buffers_of(network)]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, before in places:
                put_back(module, name, buffer)
                buffer.copy_(before)


def put_back(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Copy a buffer's value into its original tensor, if a forward pass has replaced that tensor."""
    now = getattr(module, name)
    if now is not tensor:
        with torch.no_grad():
            tensor.copy_(now)
        setattr(module, name, tensor)


class StepBuffers:
    """Manages a network's buffers during a step.

    Buffers that forward passes update (running statistics) end as their initial values plus the weighted mean of the
    changes. Buffers whose differences are meaningless (integers, flags, complex numbers, and masks or others that hold
    infinities when the network is built) end with the values of logical rank 0.

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
        """Store the buffers at the start of a step."""
        _copy(self._before, self._all)

    def start_again(self) -> None:
        """Reset the buffers to the start of the step, for the next logical rank."""
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
        """Put the original tensors back where a forward pass has replaced a buffer; values are kept."""
        for module, name, tensor in self._places:
            put_back(module, name, tensor)

    def end(self, changes: list[Tensor]) -> None:
        """Set the buffers to the step's result; a collective for networks with buffers taken from logical rank 0."""
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
    """The values of one logical rank, or a sum of several, that the step sums over logical ranks.

    Attributes:
        parts: One flat tensor per dtype, followed by a float64 tensor of losses, samples, control flags and non-finite
            marks.
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
        """Set all values to zero."""
        for part in self.parts:
            part.zero_()

    def add(self, other: GradientSlot) -> GradientSlot:
        """Add another leaf to this one."""
        for mine, theirs in zip(self.parts, other.parts, strict=True):
            mine.add_(theirs)
        return self


def _shaped(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    # Keep the tensor's strides (such as channels last): optimizers are fastest if gradients have the same ones.
    dense = torch.empty_like(like).stride() == like.stride()
    return flat.as_strided(like.shape, like.stride()) if dense else flat.view(like.shape)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


class ExactDataParallel(Replicas):
    """Replicas whose results are bit-identical for any number of processes.

    Args:
        network: The bare network.
        called: The callable that the step uses: the network, compiled if requested.
        collectives: The processes.
    """

    is_rehearsed = True

    def __init__(self, network: nn.Module, called: Callable[..., Any], collectives: Collectives) -> None:
        self.model = self.scored = called
        self._world = collectives.world
        self._logical_ranks = 1
        # Leaves have space for every parameter that will ever be trained; frozen ones stay zero and are dropped.
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
        """Only the exchange counts as waiting; summation counts as computing."""
        self._span = stopwatch.span

    @contextmanager
    def micro_batch(self, part: MicroBatch) -> Iterator[None]:
        """Collect one logical rank's leaf; each one starts from the buffers at the start of the step."""
        if self._begun:
            self._buffers.start_again()
        else:
            self._begin(part)
        self._leaf = self._free.pop() if self._free else self._make_leaf()
        self._leaf.zero()
        for parameter, gradient in zip(self._parameters, self._leaf.gradients, strict=True):
            parameter.grad = gradient
        yield
        if part.logical_rank >= self._leaves:  # it has no samples and only matches other processes
            self._buffers.put_back()
            self._free.append(self._leaf)
            return
        if part.weight:
            self._leaf.notes[_LOSS] *= part.step_weight
        else:  # all of its images were unreadable; a mean over nothing is nan
            self._leaf.notes[_LOSS] = 0
        self._leaf.notes[_SAMPLES] = part.weight
        self._buffers.leave(part.logical_rank, self._leaf.changes, part.weight / part.step_weight)
        self._free += self._sums.push(part.logical_rank, self._leaf)

    def with_vote(
        self, loss: torch.Tensor, ask: Callable[[], ControlFlags], *, is_last: bool, spoiled: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Record the loss's share and its mark next to the gradient; the loss is unchanged."""
        self._ask = ask
        self._leaf.notes[_LOSS] = loss.detach()
        if spoiled is not None:
            self._leaf.notes[_SPOILED] = spoiled
        return loss

    def spoiled(self) -> torch.Tensor:
        """Return the sum of all logical ranks' marks."""
        assert self._combined is not None
        return self._combined.notes[_SPOILED]

    def combine(self) -> torch.Tensor:
        """Combine gradients and buffers over the step, on every process; returns its losses and samples."""
        held = self._sums.take()
        self._vote(held)
        self._combined = combined = self._exchange(held)
        for parameter, gradient in zip(self._parameters, combined.gradients, strict=True):
            # A parameter frozen meanwhile must not decay either.
            parameter.grad = gradient if parameter.requires_grad else None
        self._buffers.end(combined.changes)
        self._begun = False
        self._votes.cast(combined.notes[_WISH])
        return combined.notes[:_STOP].clone()

    def agreed(self, flags: ControlFlags) -> ControlFlags:
        """Return the flags that any process raised; the same on every process after the same step."""
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
        """Write this process's flags into one of its leaves; without samples, keep them for a later step."""
        flags = self._ask()
        for leaf in list(held.values())[:1]:
            if flags.stop:
                leaf.notes[_STOP] = 1
            if flags.save:
                leaf.notes[_SAVE] = 1

    def _exchange(self, held: dict[Node, GradientSlot]) -> GradientSlot:
        """Finish the tree; with several processes each finishes its slice, and the slices are then gathered."""
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
        """Exchange slices of one part: return this process's slice of every process's partial sums, by node."""
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
