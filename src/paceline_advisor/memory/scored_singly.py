"""What does an evaluation make and let go of that scores its samples one by one, as a detector does?

Done for one sample and for two, and not for all: each further one takes as much as the second did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.telemetry.allocations import Allocation, AllocationTrace
from paceline.trainer.fake_step import FakeStep


@dataclass(frozen=True)
class ScoredSingly:
    """An evaluation's storages, to be put behind any step of the same run.

    Attributes:
        held: Storages that were there before, which come first in every trace.
        allocations: Those that it made.
        events: What happens to them: ``n`` is made, ``~n`` goes.
    """

    held: int
    allocations: tuple[Allocation, ...]
    events: tuple[int, ...]

    def append_to(self, trace: AllocationTrace) -> None:
        """Let it have happened."""
        behind = len(trace.allocations) - self.held
        trace.allocations += self.allocations
        trace.events += (event + behind if event >= 0 else event - behind for event in self.events)


def scored_singly(step: FakeStep, trace_of: Callable[[FakeStep, int], tuple[int, AllocationTrace]]) -> ScoredSingly:
    """The evaluation of a fake run.

    Args:
        step: The run.
        trace_of: Evaluates so many samples, and gives how many storages were there before, and the trace.

    Raises:
        ModelError: If it cannot be had.
    """
    count = step.scored_samples
    held, few = trace_of(step, min(2, count))
    allocations, events = tuple(few.allocations[held:]), _own(few, held)
    if count > 2:
        _, one = trace_of(step, 1)
        more = (count - 2) * max(0, _most(few, held) - _most(one, held))
        extra = Allocation(more, "activations", "evaluation", "", f"{count - 2} further samples")
        number = held + len(allocations)
        allocations, events = (*allocations, extra), (number, *events, ~number)
    return ScoredSingly(held, allocations, events)


def _own(trace: AllocationTrace, held: int) -> tuple[int, ...]:
    return tuple(event for event in trace.events if max(event, ~event) >= held)


def _most(trace: AllocationTrace, held: int) -> int:
    return _peak(_own(trace, held), [each.size for each in trace.allocations])


def _peak(events: Sequence[int], sizes: Sequence[int]) -> int:
    total = most = 0
    for event in events:
        total += sizes[event] if event >= 0 else -sizes[~event]
        most = max(most, total)
    return most
