"""Replay the storages of a run on a device, and find its peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline_advisor.memory.allocations import ROOM
from paceline_advisor.memory.allocator import PLAIN, Block, CachingAllocator, DoesNotFitError, Settings
from paceline_advisor.memory.trace import StepTrace

_LARGEST = 5


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The moment of a run with the highest memory use.

    Attributes:
        allocated: Bytes in use at that moment, as ``torch.cuda.max_memory_allocated`` counts them; on a CPU, bytes of
            the tensors.
        reserved: Peak memory reserved from the device; None on a CPU, where nothing is cached.
        causes: Bytes in use at that moment, by purpose, including rounding.
        phase: Phase of the step at that moment; ``evaluation`` outside of a step.
        layer: The module that runs at that moment.
        operation: The operation at that moment.
        largest: The layers with the largest activations at that moment, with their bytes.
        parts: Peak of the bytes in use in each part of the run, such as its first step, later steps, its evaluation.
    """

    allocated: int
    reserved: int | None
    causes: Mapping[str, int]
    phase: str
    layer: str
    operation: str
    largest: tuple[tuple[str, int], ...]
    parts: Mapping[str, int]

    @property
    def taken(self) -> int:
        """Peak bytes taken from the device: reserved with a caching allocator, else allocated."""
        return self.allocated if self.reserved is None else self.reserved

    def to_json(self) -> dict[str, Any]:
        """Return the peak as one JSON object."""
        return {
            "allocated_bytes": self.allocated,
            "reserved_bytes": self.reserved,
            "causes": self.causes,
            "phase": self.phase,
            "layer": self.layer,
            "operation": self.operation,
            "largest_layers": [{"layer": layer, "activation_bytes": size} for layer, size in self.largest],
            "allocated_bytes_by_part": self.parts,
        }


def _played(step: StepTrace, allocator: CachingAllocator | None) -> Iterator[tuple[str, int, int]]:
    """Allocate and free a run's storages on a device.

    Args:
        step: The run.
        allocator: The device's allocator; None for a CPU.

    Yields:
        The name of the part, the number of events so far, and the bytes in use, at the start of each part and after
        each of its events.

    Raises:
        DoesNotFitError: If a storage does not fit on the device.
    """
    live: dict[int, Block | None] = {}
    allocated = done = 0
    for name, events in step.played:
        yield name, done, allocated
        for event in events:
            number = max(event, ~event)
            each = step.allocations[number]
            # Memory set aside for kernels decides what fits, but does not count.
            counts = each.cause != ROOM
            if number in live:
                block = live.pop(number)
                allocated -= block.size if block is not None and counts else 0
                if allocator is not None:
                    allocator.free(block)
            if event >= 0:
                # Batches are copied and normalised during the step, on a separate stream.
                stream = 1 if each.cause == "batch" else 0
                block = (
                    Block(0, each.size, (stream, False)) if allocator is None else allocator.allocate(each.size, stream)
                )
                live[number] = block
                allocated += block.size if block is not None and counts else 0
            done += 1
            yield name, done, allocated


def peak_of(step: StepTrace, *, caching: bool, allocator: Settings = PLAIN) -> Peak:
    """Find the peak of a run.

    Args:
        step: The run's steps and its evaluation.
        caching: Whether its device has PyTorch's caching allocator, as GPUs have.
        allocator: Options of that allocator.
    """
    reserving = CachingAllocator(settings=allocator) if caching else None
    parts: dict[str, int] = {}
    most, until = 0, 0
    for name, done, allocated in _played(step, reserving):
        parts[name] = max(parts.get(name, 0), allocated)
        if allocated > most:
            most, until = allocated, done
    live: dict[int, None] = {}
    for event in step.events[:until]:
        if event < 0:
            live.pop(~event, None)
        else:
            live[event] = None
    causes, layers = Counter[str](), Counter[str]()
    for each in (step.allocations[number] for number in sorted(live)):
        if each.cause != ROOM:
            causes[each.cause] += each.size
        if each.cause == "activations":
            layers[each.layer] += each.size
    if rounding := most - sum(causes.values()):
        causes["rounding"] = rounding
    last = step.allocations[step.events[until - 1]]
    return Peak(
        allocated=most,
        reserved=None if reserving is None else reserving.peak_reserved,
        causes=dict(causes),
        phase=last.phase,
        layer=last.layer,
        operation=last.operation,
        largest=tuple(layers.most_common(_LARGEST)),
        parts=parts,
    )


def fits(step: StepTrace, room: int, *, caching: bool, allocator: Settings = PLAIN) -> bool:
    """Whether a run completes with ``room`` bytes of memory."""
    if not caching:
        return peak_of(step, caching=False).allocated <= room
    try:
        for _ in _played(step, CachingAllocator(limit=room, settings=allocator)):
            pass
    except DoesNotFitError:
        return False
    return True
