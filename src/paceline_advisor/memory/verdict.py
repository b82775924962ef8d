"""Replicas or spread weights: DDP or FSDP? By the rule of `parallel.strategy=auto`, and what then fits."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import RecipeError
from paceline.recipe.strategy import check_sharding
from paceline.recipe.strategy import weigh as weighed
from paceline.units import format_bytes
from paceline_advisor.memory.job import Job


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a run comes to.

    Attributes:
        strategy: ``ddp`` or ``fsdp``: what ``parallel.strategy=auto`` is on such processes.
        processes: Of how many it is said.
        reason: Why, in the words of the run's plan, and what fits so.
    """

    strategy: str
    processes: int
    reason: str


def weigh(job: Job, memory: int | None, processes: int) -> Verdict:
    """Say which of the two a run takes, by the one rule that there is, and how far that goes.

    Args:
        job: The run's process.
        memory: Bytes of each device; None if unknown.
        processes: Of the run, or of the one that is supposed.
    """
    choice = weighed(job.recipe, job.numbers, processes, memory)
    reason = choice.reason.removeprefix(f"{processes} processes; ")
    if memory is None:
        reason = "the device's memory is unknown; replicas are faster"
    else:
        reason = f"{reason}; {_outcome(job, memory, processes, choice.strategy)}"
    return Verdict(strategy=choice.strategy, processes=processes, reason=reason)


def _outcome(job: Job, memory: int, processes: int, strategy: str) -> str:
    """What fits with a strategy."""
    if strategy == "fsdp":
        try:
            check_sharding(job.recipe, processes)
        except RecipeError as error:
            return f"but {str(error).rstrip('.')}"
    size = max(1, min(job.plan.micro_batch_size, job.share * job.plan.world_size // processes))
    if job.fits(size, memory, strategy):
        left = memory - job.least(size, memory, strategy)
        beside = f", {format_bytes(left)} are left" if left > 0 else ""
        return f"micro-batches of {size} samples fit{beside}"
    most = job.largest(memory, strategy)
    if most:
        return (
            f"micro-batches of {size} samples do not fit, but of {most} they do, and accumulation makes the same step "
            "of them"
        )
    if strategy == "ddp" and job.fits(1, memory, "fsdp"):
        return "but not even one sample fits beside a replica, and with parallel.strategy=fsdp it does"
    return "but not even one sample fits so"
