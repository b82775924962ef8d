"""Replicas or spread weights: DDP or FSDP?"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.studies.memory.job import Job
from paceline.units import format_bytes

# Accumulation costs little as long as a micro-batch keeps the device busy; beyond this the other way is worth trying.
_MOST_PARTS = 8


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is advised.

    Attributes:
        strategy: ``ddp``, ``fsdp``, ``single``, or ``none`` if neither helps.
        processes: Of how many it is said.
        reason: Why, in a sentence.
    """

    strategy: str
    processes: int
    reason: str


def weigh(job: Job, memory: int | None, processes: int) -> Verdict:
    """Choose between replicas and spread weights.

    DDP holds every weight on every device and sends only gradients; FSDP holds each weight once and sends weights too,
    which costs time. So: DDP if a replica and its activations fit, FSDP if a replica does not fit at all, and in
    between smaller micro-batches first, which cost less.

    Args:
        job: The run's process.
        memory: Bytes of each device; None if unknown.
        processes: Of the run, or of the one that is supposed.
    """
    size = max(1, min(job.plan.micro_batch_size, job.share * job.plan.world_size // processes))
    if memory is None:
        return Verdict(
            strategy="ddp", processes=processes, reason="the device's memory is unknown; replicas are faster"
        )

    def said(strategy: str, reason: str) -> Verdict:
        return Verdict(strategy=strategy, processes=processes, reason=reason)

    if job.fits(size, memory, "ddp"):
        left = memory - job.needed(size, "ddp")
        return said(
            "ddp",
            f"a replica with the activations of {size} samples fits, {format_bytes(max(left, 0))} are left, and only "
            "gradients are sent; fsdp would send weights too",
        )
    spreads = job.fits(1, memory, "fsdp")
    if not job.fits(1, memory, "ddp"):
        if spreads:
            return said(
                "fsdp", f"a replica does not fit with even one sample; spread over {processes} processes it does"
            )
        return said("none", f"not even one sample fits, also with weights spread over {processes} processes")
    most = job.largest(memory, "ddp")
    if size <= most * _MOST_PARTS:
        return said(
            "ddp",
            f"{size} samples do not fit beside a replica, but {most} do, and accumulation makes the same step of them; "
            "fsdp is for those that need more samples in each forward pass",
        )
    if job.fits(size, memory, "fsdp") or job.largest(memory, "fsdp") > most:
        return said("fsdp", f"beside a replica only {most} samples fit, and more of them beside a part of the weights")
    return said("ddp", f"{most} samples fit beside a replica, and no more beside a part of the weights")
