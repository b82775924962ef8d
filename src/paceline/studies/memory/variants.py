"""What becomes of a step's storages where gradients are added up over micro-batches, or processes share the work?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from paceline.distributed.sharding import modules_to_shard
from paceline.formulas.caching_allocator import MIB
from paceline.recipe.running import Parallel
from paceline.studies.memory.trace import StepTrace
from paceline.telemetry.allocations import Allocation

GATHERED = "gathered weights"
"""What FSDP holds of other processes' weights for a moment, and of gradients that are theirs."""

# The first bucket is small, so that the reduction begins early (torch's kDefaultFirstBucketBytes).
_FIRST_BUCKET = MIB
_SPREAD = ("weights", "average", "optimizer")


def with_more(step: StepTrace, more: Iterable[Allocation]) -> StepTrace:
    """A step with other storages in memory from its beginning to its end."""
    added = tuple(more)
    count = len(step.allocations)
    numbers = range(count, count + len(added))
    return replace(step, allocations=(*step.allocations, *added), events=(*numbers, *step.events))


def with_gradients(step: StepTrace, kept: Iterable[Allocation] | None = None) -> StepTrace:
    """A step to whose gradients others are added: those of earlier micro-batches, or of DDP's buckets.

    Args:
        step: One that makes its gradients.
        kept: What they are added to; a storage like each unless given.
    """
    numbers = {number for number, each in enumerate(step.allocations) if each.cause == "gradients"}
    made = [step.allocations[number] for number in sorted(numbers)]
    allocations = tuple(
        replace(each, cause="temporary") if number in numbers else each for number, each in enumerate(step.allocations)
    )
    changed = replace(step, allocations=allocations, events=_let_go_at_once(step.events, numbers))
    return with_more(changed, (Allocation(each.size, "gradients") for each in made) if kept is None else kept)


def _let_go_at_once(events: Sequence[int], numbers: set[int]) -> tuple[int, ...]:
    """Free some storages before the next one is made, and not when they went."""
    changed: list[int] = []
    added: list[int] = []
    for event in events:
        if event >= 0:
            changed += [~number for number in added]
            added = [event] if event in numbers else []
            changed.append(event)
        elif ~event not in numbers:
            changed.append(event)
    return (*changed, *(~number for number in added))


def buckets(step: StepTrace, cap_mb: int) -> list[Allocation]:
    """DDP's buckets for a step's gradients, in the order in which they come; ``.grad`` is a view of them.

    Args:
        step: One that makes its gradients.
        cap_mb: ``parallel.bucket_cap_mb``.
    """
    sizes: list[int] = []
    current, limit = 0, _FIRST_BUCKET
    for each in step.allocations:
        if each.cause == "gradients":
            current += each.size
            if current >= limit:
                sizes.append(current)
                current, limit = 0, cap_mb * MIB
    return [Allocation(size, "gradients", operation="bucket") for size in (*sizes, *([current] if current else []))]


@dataclass(frozen=True)
class Spread:
    """How FSDP spreads a network.

    Attributes:
        ways: Processes that share one copy.
        largest: Bytes of the weights that are gathered together, of the largest such part.
        trained: Of these, bytes of those that are trained.
        kept: Bytes of all parts, if they stay whole from the forward to the backward pass; 0 if they do not.
    """

    ways: int
    largest: int
    trained: int
    kept: int = 0


def spread_of(network: nn.Module, parallel: Parallel, processes: int) -> Spread:
    """What a recipe asks for, with so many processes.

    Raises:
        ModelError: If it names modules that the network does not have.
    """
    ways = processes if parallel.shard_size == "all" else min(parallel.shard_size, processes)
    sharded = modules_to_shard(network, parallel)
    taken: set[int] = set()
    parts: list[Mapping[int, nn.Parameter]] = []
    for module in (*sharded.values(), network):  # inner ones first
        own = {id(each): each for each in module.parameters() if id(each) not in taken}
        taken |= own.keys()
        parts.append(own)
    bytes_each = 2 if parallel.gather_dtype == "bf16" else 4
    largest = max(parts, key=lambda part: sum(each.numel() for each in part.values()))
    return Spread(
        ways=ways,
        largest=bytes_each * sum(each.numel() for each in largest.values()),
        trained=4 * sum(each.numel() for each in largest.values() if each.requires_grad),
        kept=0 if parallel.reshard_after_forward else bytes_each * sum(each.numel() for each in network.parameters()),
    )


def fully_sharded(step: StepTrace, spread: Spread) -> StepTrace:
    """One process's step under FSDP.

    While a part computes, it is gathered whole and the next one is on its way; in the backward pass its gradient is
    whole too, and copied once to be sent. All of this is taken to be there for the whole step, and of the largest part:
    a little more than there ever is.
    """
    ways = spread.ways
    parts = [Allocation(-(-each.size // ways), "gradients") for each in step.allocations if each.cause == "gradients"]
    cut = with_gradients(step, parts)
    allocations = tuple(
        replace(each, size=-(-each.size // ways)) if each.cause in _SPREAD and not each.phase else each
        for each in cut.allocations
    )
    # Gathered: the part at work, as it came and as it is used, and the next one as it comes.
    at_work = max(3 * spread.largest, spread.kept + 2 * spread.largest)
    gathered = Allocation(at_work, GATHERED), Allocation(2 * spread.trained, GATHERED)
    return with_more(replace(cut, allocations=allocations), gathered)
