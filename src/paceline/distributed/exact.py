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
def preserve_buffers(network: nn.Module) -> Iterator[None]:
    """Context for passes outside of training steps: restores every buffer's tensor and values, also after an error."""
    entries = [(*entry, entry[-1].clone()) for entry in buffers_of(network)]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, saved in entries:
                restore_tensor(module, name, buffer)
                buffer.copy_(saved)


def restore_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Copy a buffer's value into its original tensor, if a forward pass has replaced that tensor."""
    current = getattr(module, name)
    if current is not tensor:
        with torch.no_grad():
            tensor.copy_(current)
        setattr(module, name, tensor)


class StepBuffers:
    """Manages a network's buffers during a step.

    Buffers that forward passes update (running statistics) end as their initial values plus the weighted mean of the
    changes. Buffers whose differences are meaningless (integers, flags, complex numbers, and masks or others that hold
    infinities when the network is built) end with the values of logical rank 0.

    Attributes:
        summed: The buffers whose changes are added up.
        needs_broadcast: Whether others have the values of logical rank 0.
    """

    def __init__(self, network: nn.Module, collectives: Collectives) -> None:
        self._entries = list(buffers_of(network))
        self._tensors = [tensor for _, _, tensor in self._entries]
        self._initial = [torch.empty_like(tensor) for tensor in self._tensors]
        is_summed = [each.is_floating_point() and bool(each.isfinite().all()) for each in self._tensors]
        self.summed = [tensor for tensor, is_number in zip(self._tensors, is_summed, strict=True) if is_number]
        self._summed_initial = [
            initial for initial, is_number in zip(self._initial, is_summed, strict=True) if is_number
        ]
        self._rank0 = [tensor for tensor, is_number in zip(self._tensors, is_summed, strict=True) if not is_number]
        self._rank0_result = [torch.empty_like(each) for each in self._rank0]
        self.needs_broadcast = any(
            name != _COUNTER for (_, name, _), is_number in zip(self._entries, is_summed, strict=True) if not is_number
        )
        self._collectives = collectives

    def begin(self) -> None:
        """Store the buffers at the start of a step."""
        _copy(self._initial, self._tensors)

    def reset(self) -> None:
        """Reset the buffers to the start of the step, for the next logical rank."""
        _copy(self._tensors, self._initial)

    def record_changes(self, logical_rank: int, changes: list[Tensor], share: float) -> None:
        """Write a logical rank's share of the changes into ``changes``, in the order of :attr:`summed`."""
        self.restore_tensors()
        if self.summed:
            _copy(changes, self.summed)
            torch._foreach_sub_(changes, self._summed_initial)
            torch._foreach_mul_(changes, share)
        if logical_rank == 0:
            _copy(self._rank0_result, self._rank0)

    def restore_tensors(self) -> None:
        """Put the original tensors back where a forward pass has replaced a buffer; values are kept."""
        for module, name, tensor in self._entries:
            restore_tensor(module, name, tensor)

    def end(self, changes: list[Tensor]) -> None:
        """Set the buffers to the step's result; a collective for networks with buffers taken from logical rank 0."""
        if self.summed:
            _copy(self.summed, self._summed_initial)
            torch._foreach_add_(self.summed, changes)
        if self.needs_broadcast:
            if self._collectives.world.is_first:
                _copy(self._rank0, self._rank0_result)
            self._collectives.broadcast_tensors(self._rank0)


def _copy(targets: list[Tensor], sources: list[Any]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)


_LOSS, _SAMPLES, _STOP, _SAVE, _NONFINITE = range(5)
_FLAGS = slice(_STOP, _SAVE + 1)

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
                views[number] = _view_like(flat[end - tensors[number].numel() : end], tensors[number])
            self.parts.append(flat)
        exact = torch.float32 if tensors[0].device.type == "mps" else torch.float64
        self.scalars = torch.zeros(_round_up(5, slices), dtype=exact, device=tensors[0].device)
        self.parts.append(self.scalars)
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


def _view_like(flat: torch.Tensor, template: torch.Tensor) -> torch.Tensor:
    # Keep the tensor's strides (such as channels last): optimizers are fastest if gradients have the same ones.
    dense = torch.empty_like(template).stride() == template.stride()
    return flat.as_strided(template.shape, template.stride()) if dense else flat.view(template.shape)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


class ExactDataParallel(Replicas):
    """Replicas whose results are bit-identical for any number of processes.

    Args:
        network: The bare network.
        forward_fn: The callable that the step uses: the network, compiled if requested.
        collectives: The processes.

    Attributes:
        shift: Each process computes the logical ranks of the one this many ranks further.
    """

    needs_warmup = True
    shift = 0

    def __init__(self, network: nn.Module, forward_fn: Callable[..., Any], collectives: Collectives) -> None:
        self.model = self.eval_model = forward_fn
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
        self._is_started = False
        self._get_flags: Callable[[], ControlFlags] = ControlFlags
        self._votes = FlagReader(self._leaf.scalars.device, count=len(ControlFlags._fields))
        self._span: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()

    @property
    def can_shift(self) -> bool:
        """Whether no buffer has the values of logical rank 0, which the first process is to have."""
        return not self._buffers.needs_broadcast

    def timed_by(self, stopwatch: Stopwatch) -> None:
        """Only the exchange counts as waiting; summation counts as computing."""
        self._span = stopwatch.span

    @contextmanager
    def micro_batch(self, part: MicroBatch) -> Iterator[None]:
        """Collect one logical rank's leaf; each one starts from the buffers at the start of the step."""
        if self._is_started:
            self._buffers.reset()
        else:
            self._begin(part)
        self._leaf = self._free.pop() if self._free else self._make_leaf()
        self._leaf.zero()
        for parameter, gradient in zip(self._parameters, self._leaf.gradients, strict=True):
            parameter.grad = gradient
        yield
        if part.logical_rank >= self._leaves:  # it has no samples and only matches other processes
            self._buffers.restore_tensors()
            self._free.append(self._leaf)
            return
        if part.weight:
            self._leaf.scalars[_LOSS] *= part.step_weight
        else:  # all of its images were unreadable; a mean over nothing is nan
            self._leaf.scalars[_LOSS] = 0
        self._leaf.scalars[_SAMPLES] = part.weight
        self._buffers.record_changes(part.logical_rank, self._leaf.changes, part.weight / part.step_weight)
        self._free += self._sums.push(part.logical_rank, self._leaf)

    def with_vote(
        self,
        loss: torch.Tensor,
        get_flags: Callable[[], ControlFlags],
        *,
        is_last: bool,
        nonfinite: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Record the loss's share and its mark next to the gradient; the loss is unchanged."""
        self._get_flags = get_flags
        self._leaf.scalars[_LOSS] = loss.detach()
        if nonfinite is not None:
            self._leaf.scalars[_NONFINITE] = nonfinite
        return loss

    def nonfinite(self) -> torch.Tensor:
        """Return the sum of all logical ranks' marks."""
        assert self._combined is not None
        return self._combined.scalars[_NONFINITE]

    def combine(self) -> torch.Tensor:
        """Combine gradients and buffers over the step, on every process; returns its losses and samples."""
        sums = self._sums.take()
        self._vote(sums)
        self._combined = combined = self._exchange(sums)
        for parameter, gradient in zip(self._parameters, combined.gradients, strict=True):
            # A parameter frozen meanwhile must not decay either.
            parameter.grad = gradient if parameter.requires_grad else None
        self._buffers.end(combined.changes)
        self._is_started = False
        self._votes.push(combined.scalars[_FLAGS])
        return combined.scalars[:_STOP].clone()

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
        self._is_started = True

    def _make_leaf(self) -> GradientSlot:
        return GradientSlot(
            [each.detach() for each in self._parameters], self._buffers.summed, slices=self._world.world_size
        )

    def _vote(self, sums: Mapping[Node, GradientSlot]) -> None:
        """Write this process's flags into one of its leaves; without samples, keep them for a later step."""
        flags = self._get_flags()
        for leaf in list(sums.values())[:1]:
            if flags.stop:
                leaf.scalars[_STOP] = 1
            if flags.save:
                leaf.scalars[_SAVE] = 1

    def _exchange(self, sums: dict[Node, GradientSlot]) -> GradientSlot:
        """Finish the tree; with several processes each finishes its slice, and the slices are then gathered."""
        if self._world.world_size == 1:
            combined = total(sums, GradientSlot.add, leaves=self._leaves)
            self._free += [leaf for leaf in sums.values() if leaf is not combined]
            return combined
        with self._span("communication"):
            slices = [
                self._exchange_slices(part, [leaf.parts[part] for leaf in sums.values()])
                for part in range(len(self._leaf.parts))
            ]
        self._free += sums.values()
        combined = self._free.pop() if self._free else self._make_leaf()
        for part, nodes in enumerate(slices):
            own_slice = total(nodes, torch.Tensor.add_, leaves=self._leaves)
            with self._span("communication"):
                _gather(combined.parts[part], own_slice)
        return combined

    def _exchange_slices(self, part: int, sums: list[torch.Tensor]) -> dict[Node, torch.Tensor]:
        """Exchange slices of one part: return this process's slice of every process's partial sums, by node."""
        flat = self._leaf.parts[part]
        size = flat.numel() // self._world.world_size
        per_process = self._logical_ranks // self._world.world_size
        nodes_by_process = [
            nodes_of(min(first, self._leaves), min(first + per_process, self._leaves))
            for first in range(0, self._logical_ranks, per_process)
        ]
        nodes_by_process = nodes_by_process[self.shift :] + nodes_by_process[: self.shift]
        received: dict[Node, torch.Tensor] = {}
        for index in range(max(len(nodes) for nodes in nodes_by_process)):
            senders = [nodes[index] for nodes in nodes_by_process if index < len(nodes)]
            output = flat.new_empty(size * len(senders))
            torch.distributed.all_to_all_single(
                output,
                sums[index] if index < len(sums) else flat.new_empty(0),
                [size if index < len(nodes) else 0 for nodes in nodes_by_process],
                [size if index < len(sums) else 0] * self._world.world_size,
            )
            received.update(zip(senders, torch.split(output, size), strict=True))
        return received
