"""What do DDP's gradients take on their way, where they are sent in fewer bits or as thin matrices?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.distributed.collectives import Collectives
from paceline.distributed.powersgd import PowerSgd
from paceline.recipe.running import Parallel
from paceline.studies.memory.trace import FIRST, STEP, StepTrace
from paceline.studies.memory.variants import buckets, update_begins, with_more
from paceline.telemetry.allocations import Allocation, AllocationTrace
from paceline.world import World

COMPRESSION = "compression"
"""What is kept for it from step to step: PowerSGD's errors and factors."""


@dataclass(frozen=True, kw_only=True)
class Hook:
    """What sending one bucket takes.

    Attributes:
        kept: Storages that stay from step to step.
        passing: Those that come and go in between.
        events: What happens to the latter, by their place in ``passing``; those that stay longer go with the update.
    """

    kept: tuple[Allocation, ...] = ()
    passing: tuple[Allocation, ...] = ()
    events: tuple[int, ...] = ()


def hooks_of(step: StepTrace, network: nn.Module, parallel: Parallel) -> tuple[Hook, ...]:
    """What sending each bucket of a step takes; to be asked where tensors are fake.

    Args:
        step: One that makes its gradients.
        network: Whose they are.
        parallel: How they are sent.
    """
    found = buckets(step, parallel.bucket_cap_mb)
    match parallel.gradient_compression:
        case "none":
            return ()
        case "powersgd":
            shapes = [[step.shapes[number] for number in numbers] for _, numbers in found]
            return tuple(_factored(each, network, parallel) for each in shapes)
    halves = (Allocation(bucket.size // 2, "temporary", "backward", operation="compressed") for bucket, _ in found)
    return tuple(Hook(passing=(half,), events=(0,)) for half in halves)


def compressed(step: StepTrace, hooks: Sequence[Hook], cap_mb: int) -> StepTrace:
    """A run whose buckets are sent so; gradients are in them, and go, after this (:func:`with_gradients`)."""
    if not hooks:
        return step
    for name in (FIRST, STEP):
        ends = [numbers[-1] for _, numbers in buckets(step, cap_mb, name)]
        for end, hook in zip(ends, hooks, strict=False):
            step = _with_hook(step, name, end, hook)
    return with_more(step, (each for hook in hooks for each in hook.kept))


def _with_hook(step: StepTrace, name: str, end: int, hook: Hook) -> StepTrace:
    """One part, in which a hook is called when the last gradient of its bucket is there."""
    first = len(step.allocations)
    inside = [event + first if event >= 0 else event - first for event in hook.events]
    left = [number for number in inside if number >= 0 and ~number not in inside]
    step = replace(step, allocations=(*step.allocations, *hook.passing))

    def change(events: tuple[int, ...]) -> tuple[int, ...]:
        place, update = events.index(end) + 1, update_begins(step, events)
        return (*events[:place], *inside, *events[place:update], *(~number for number in left), *events[update:])

    return step.with_parts(change, name)


@dataclass(frozen=True)
class _Bucket:
    """What the hook is given of a bucket."""

    named: Sequence[nn.Parameter]
    made: Sequence[Tensor]

    def parameters(self) -> Sequence[nn.Parameter]:
        """Whose gradients it holds."""
        return self.named

    def gradients(self) -> Sequence[Tensor]:
        """The gradients."""
        return self.made

    def buffer(self) -> Tensor:
        """All of it."""
        return self.made[0]


def _factored(shapes: Sequence[tuple[int, ...]], network: nn.Module, parallel: Parallel) -> Hook:
    """Let PowerSGD send such gradients, twice: the second time it has errors and factors of the first."""
    by_shape: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for parameter in network.parameters():
        by_shape.setdefault(tuple(parameter.shape), []).append(parameter)
    # Any of that shape will do, as long as none comes twice.
    named = [by_shape[shape].pop() for shape in shapes]
    bucket: Any = _Bucket(named, [torch.empty(shape) for shape in shapes])
    hook = PowerSgd(network, Collectives(World()), rank=parallel.powersgd.rank, start_step=0)
    hook.begin_step()
    hook.hook(bucket)
    with AllocationTrace(lambda: ("backward", "")) as trace:
        trace.hold(bucket.gradients(), "gradients")
        held = len(trace.allocations)
        hook.hook(bucket)
    return _as_hook(trace, held)


def _as_hook(trace: AllocationTrace, held: int) -> Hook:
    """What a call made; what outlives it replaces what the call before left, and is there already."""
    made = trace.allocations[held:]
    events = [event for event in trace.events if max(event, ~event) >= held]
    events = [event - held if event >= 0 else event + held for event in events]
    # What the call before left is seen where it is used: it has no phase.
    before = {number for number, each in enumerate(made) if not each.phase}
    events = [event for event in events if max(event, ~event) not in before]
    staying = {event for event in events if event >= 0 and ~event not in events}
    kept = tuple(replace(made[number], cause=COMPRESSION, phase="") for number in sorted(staying))
    passing = tuple(replace(each, cause="temporary") for each in made)
    # As soon as the new is made, the old goes.
    replaced = (now for event in events for now in ((event, ~event) if event in staying else (event,)))
    return Hook(kept=kept, passing=passing, events=tuple(replaced))
