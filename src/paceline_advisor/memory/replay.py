"""Replay of a run's storages on a device, and its peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
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
            "allocated_bytes_by_part": dict(self.parts),
        }


class _Device:
    """Storages as they come and go on a device.

    Args:
        step: What they are of.
        allocator: The device's; None if it has none, as a CPU.
    """

    def __init__(self, step: StepTrace, allocator: CachingAllocator | None) -> None:
        self.allocated = 0
        self._allocations, self._allocator = step.allocations, allocator
        self._live: dict[int, Block | None] = {}

    def see(self, event: int) -> None:
        """Let a storage be made, or go.

        Raises:
            DoesNotFitError: If the device has no room for it.
        """
        number = max(event, ~event)
        if number in self._live:
            self._let_go(number)
        if event >= 0:
            self._make(number)

    def _make(self, number: int) -> None:
        each = self._allocations[number]
        if self._allocator is None:
            self._live[number] = None
            self.allocated += each.size
        else:
            block = self._live[number] = self._allocator.allocate(each.size, _stream(each.cause))
            self.allocated += block.size if block is not None and each.cause != ROOM else 0

    def _let_go(self, number: int) -> None:
        block, each = self._live.pop(number), self._allocations[number]
        if self._allocator is None:
            self.allocated -= each.size
        else:
            self.allocated -= block.size if block is not None and each.cause != ROOM else 0
            self._allocator.free(block)


def peak_of(step: StepTrace, *, caching: bool, allocator: Settings = PLAIN) -> Peak:
    """Find the peak of a run.

    Args:
        step: Its steps and its evaluation.
        caching: Whether its device has PyTorch's caching allocator, as GPUs have.
        allocator: How that is set.
    """
    reserving = CachingAllocator(settings=allocator) if caching else None
    device = _Device(step, reserving)
    parts: dict[str, int] = {}
    most, at, position = 0, 0, -1
    for name, events in step.played:
        most_here = max(parts.get(name, 0), device.allocated)
        for event in events:
            position += 1
            device.see(event)
            if device.allocated > most_here:
                most_here = device.allocated
                if most_here > most:
                    most, at = most_here, position
        parts[name] = most_here
    return _described(step, at, most, None if reserving is None else reserving.peak_reserved, parts)


def fits(step: StepTrace, room: int, *, caching: bool, allocator: Settings = PLAIN) -> bool:
    """Whether a run goes on in so many bytes."""
    if not caching:
        return peak_of(step, caching=False).allocated <= room
    device = _Device(step, CachingAllocator(limit=room, settings=allocator))
    try:
        for event in step.events:
            device.see(event)
    except DoesNotFitError:
        return False
    return True


def _stream(cause: str) -> int:
    # Batches are copied and normalised beside the step, on a stream of their own.
    return 1 if cause == "batch" else 0


def _described(step: StepTrace, at: int, most: int, reserved: int | None, parts: Mapping[str, int]) -> Peak:
    live = _live(step.events[: at + 1])
    causes = Counter[str]()
    layers = Counter[str]()
    for number in live:
        each = step.allocations[number]
        if each.cause != ROOM:
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
        parts=dict(parts),
    )


def _live(events: Iterable[int]) -> set[int]:
    live: set[int] = set()
    for event in events:
        if event < 0:
            live.discard(~event)
        else:
            live.add(event)
    return live
