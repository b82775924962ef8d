"""What does a step's sequence of storages come to on a device, and when is it the most?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.formulas.caching_allocator import Block, CachingAllocator, DoesNotFitError
from paceline.studies.memory.trace import StepTrace

_LARGEST = 5


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The moment of a step at which the most memory is in use.

    Attributes:
        allocated: Bytes in use then, as ``torch.cuda.max_memory_allocated`` counts them; on a CPU, of the tensors.
        reserved: The most that was taken from the device in the step; None on a CPU, where nothing is kept back.
        causes: Bytes of what is in use then, by what it is for; rounding is one of them.
        phase: Where in the step that is.
        layer: Which module is at work.
        operation: Which operation.
        largest: The layers whose activations take the most then, with their bytes.
    """

    allocated: int
    reserved: int | None
    causes: Mapping[str, int]
    phase: str
    layer: str
    operation: str
    largest: tuple[tuple[str, int], ...]

    def to_json(self) -> dict[str, Any]:
        """As one JSON object."""
        return {
            "allocated_bytes": self.allocated,
            "reserved_bytes": self.reserved,
            "causes": dict(self.causes),
            "phase": self.phase,
            "layer": self.layer,
            "operation": self.operation,
            "largest_layers": [{"layer": layer, "activation_bytes": size} for layer, size in self.largest],
        }


def peak_of(step: StepTrace, *, caching: bool, expandable: bool = False) -> Peak:
    """Find the peak of a step.

    Args:
        step: The step.
        caching: Whether its device has PyTorch's caching allocator, as GPUs have.
        expandable: With expandable segments.
    """
    allocator = CachingAllocator(expandable=expandable)
    most, at = 0, 0
    plain = 0
    blocks: dict[int, Block | None] = {}
    for position, event in enumerate(step.events):
        if event < 0:
            plain -= step.allocations[~event].size
            if caching:
                allocator.free(blocks.pop(~event))
            continue
        allocation = step.allocations[event]
        plain += allocation.size
        if caching:
            blocks[event] = allocator.allocate(allocation.size, _stream(allocation.cause))
        now = allocator.allocated if caching else plain
        if now > most:
            most, at = now, position
    return _described(step, at, most, allocator.peak_reserved if caching else None)


def fits(step: StepTrace, room: int, *, caching: bool, expandable: bool = False) -> bool:
    """Whether a step runs in so many bytes."""
    if not caching:
        return peak_of(step, caching=False).allocated <= room
    allocator, blocks = CachingAllocator(limit=room, expandable=expandable), dict[int, Block | None]()
    try:
        for event in step.events:
            if event < 0:
                allocator.free(blocks.pop(~event))
            else:
                allocation = step.allocations[event]
                blocks[event] = allocator.allocate(allocation.size, _stream(allocation.cause))
    except DoesNotFitError:
        return False
    return True


def _stream(cause: str) -> int:
    # Batches are copied and normalised beside the step, on a stream of their own.
    return 1 if cause == "batch" else 0


def _described(step: StepTrace, at: int, most: int, reserved: int | None) -> Peak:
    live = _live(step.events[: at + 1])
    causes = Counter[str]()
    layers = Counter[str]()
    for number in live:
        each = step.allocations[number]
        causes[each.cause] += each.size
        if each.cause == "activations":
            layers[each.layer] += each.size
    if rounding := most - sum(causes.values()):
        causes["rounding"] = rounding
    last = step.allocations[step.events[at]]
    return Peak(
        allocated=most,
        reserved=reserved,
        causes=dict(causes),
        phase=last.phase,
        layer=last.layer,
        operation=last.operation,
        largest=tuple(layers.most_common(_LARGEST)),
    )


def _live(events: Iterable[int]) -> set[int]:
    live: set[int] = set()
    for event in events:
        if event < 0:
            live.discard(~event)
        else:
            live.add(event)
    return live
