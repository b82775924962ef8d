"""Replay of a run's storages on a device, and its peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline_advisor.memory.allocator import PLAIN, Block, CachingAllocator, DoesNotFitError, Settings
from paceline_advisor.memory.kernels import ROOM
from paceline_advisor.memory.trace import StepTrace

_LARGEST = 5


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The moment of a run at which the most memory is in use.

    Attributes:
        allocated: Bytes in use then, as ``torch.cuda.max_memory_allocated`` counts them; on a CPU, of the tensors.
        reserved: The most that was taken from the device; None on a CPU, where nothing is kept back.
        causes: Bytes of what is in use then, by what it is for; rounding is one of them.
        phase: Where in the step that is; ``evaluation`` if it is in none.
        layer: Which module is at work.
        operation: Which operation.
        largest: The layers whose activations take the most then, with their bytes.
        parts: The most in use in each part of the run: its first step, later ones, its evaluation.
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
        """Bytes that are taken from the device, if it has them."""
        return self.allocated if self.reserved is None else self.reserved

    def to_json(self) -> dict[str, Any]:
        """As one JSON object."""
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
    """Let a run's storages come and go on a device.

    Args:
        step: What they are of.
        allocator: The device's; None if it has none, as a CPU.

    Yields:
        At the beginning of each part its name, the number of events so far, and the bytes in use; and after each event.

    Raises:
        DoesNotFitError: If the device has no room for one.
    """
    live: dict[int, Block | None] = {}
    allocated = done = 0
    for name, events in step.played:
        yield name, done, allocated
        for event in events:
            number = max(event, ~event)
            each = step.allocations[number]
            # Room for kernels decides what fits, and does not count.
            counts = each.cause != ROOM
            if number in live:
                block = live.pop(number)
                allocated -= block.size if block is not None and counts else 0
                if allocator is not None:
                    allocator.free(block)
            if event >= 0:
                # Batches are copied and normalised beside the step, on a stream of their own.
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
        step: Its steps and its evaluation.
        caching: Whether its device has PyTorch's caching allocator, as GPUs have.
        allocator: How that is set.
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
    """Whether a run goes on in so many bytes."""
    if not caching:
        return peak_of(step, caching=False).allocated <= room
    try:
        for _ in _played(step, CachingAllocator(limit=room, settings=allocator)):
            pass
    except DoesNotFitError:
        return False
    return True
