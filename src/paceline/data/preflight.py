"""Check what a run's loader processes need: shared memory, file descriptors, cores.

This runs before anything starts. Otherwise a full /dev/shm kills a worker with a bus error, and a full table of file
descriptors ends the run, after minutes and with messages that name neither.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from paceline.machine import available_cores
from paceline.units import format_bytes

SHARED_MEMORY = Path("/dev/shm")

_OWN_DESCRIPTORS = Path("/proc/self/fd")
# Of the training process: pipes and sentinel of a worker, and the two tensors of each batch that is not used yet.
_DESCRIPTORS_PER_WORKER = 6
_DESCRIPTORS_PER_BATCH = 2
# Logs, checkpoints, trackers, a process group's sockets.
_DESCRIPTORS_BESIDE = 64


@dataclass(frozen=True, kw_only=True)
class Loading:
    """What a run needs on one machine to load its batches.

    Attributes:
        processes: Ranks on this machine.
        workers: Loader processes of each, for each split.
        prefetch: Batches that each loader process keeps ready.
        train_batch_bytes: Of one training micro-batch as it is loaded; 0 if nothing is trained.
        evaluation_batch_bytes: Of one evaluation batch; 0 if nothing is evaluated.
    """

    processes: int
    workers: int
    prefetch: int
    train_batch_bytes: int
    evaluation_batch_bytes: int = 0

    @property
    def least_bytes(self) -> int:
        """Of shared memory, if each loader process holds one training batch, or one of evaluation where none trains."""
        return self.processes * self.workers * (self.train_batch_bytes or self.evaluation_batch_bytes)

    @property
    def most_bytes(self) -> int:
        """Of shared memory, if each holds as many batches as it may; training's wait there during an evaluation."""
        batches = self.processes * self.workers * self.prefetch
        return batches * (self.train_batch_bytes + self.evaluation_batch_bytes)

    @property
    def descriptors(self) -> int:
        """Needed by one rank for its queued batches."""
        each = _DESCRIPTORS_PER_WORKER + _DESCRIPTORS_PER_BATCH * self.prefetch
        splits = (self.train_batch_bytes > 0) + (self.evaluation_batch_bytes > 0)
        return splits * self.workers * each + _DESCRIPTORS_BESIDE

    def __str__(self) -> str:
        count = self.processes * self.workers
        said = f"data.workers={self.workers}, data.prefetch={self.prefetch}"
        return f"{count} loader process{'es' * (count > 1)} ({said})"


@dataclass(frozen=True)
class Findings:
    """Obstacles to a run on this machine.

    Attributes:
        refusal: Why it cannot work, and what to change; empty if it may.
        warnings: What may go wrong or be slow, and what to change.
    """

    refusal: str = ""
    warnings: tuple[str, ...] = ()


def look_at_machine(loading: Loading, shared_memory: Path = SHARED_MEMORY) -> Findings:
    """Compare a run's needs with this process's limits.

    Args:
        loading: The request. shared_memory: Where the system keeps it.
    """
    if loading.workers == 0:
        return Findings()
    memory, tight = _shared_memory(loading, shared_memory)
    descriptors = _descriptors(loading)
    return Findings(memory or descriptors, tuple(each for each in (tight, _cores(loading)) if each))


def _shared_memory(loading: Loading, path: Path) -> tuple[str, str]:
    """Why there is too little shared memory, and why there may be."""
    try:
        found = os.statvfs(path)
    except OSError:
        return "", ""  # a system that keeps it elsewhere
    if not os.access(path, os.W_OK):
        return (
            f"{loading} hand over batches in shared memory, and {path} "
            "cannot be written to: mount it writable, or set data.workers=0."
        ), ""
    free = found.f_bavail * found.f_frsize
    size = "batch.micro_size" if loading.train_batch_bytes else "evaluate.batch_size"
    change = (
        # With half as much again, as Docker writes it.
        f"give it more (docker run --shm-size={max(1, -(-3 * loading.most_bytes // 2**31))}g; in Kubernetes an "
        f"emptyDir of medium Memory at {path}), or lower data.workers, data.prefetch or {size}."
    )
    if loading.least_bytes > free:
        return (
            f"a batch from each of {loading} takes {format_bytes(loading.least_bytes)} of shared memory, and {path} "
            f"has {format_bytes(free)} free: {change}"
        ), ""
    if loading.most_bytes > free:
        return "", (
            f"the batches that {loading} keep ready can take "
            f"{format_bytes(loading.most_bytes)} of shared memory, and {path} has {format_bytes(free)} free; a run "
            f"fails when it is full: {change}"
        )
    return "", ""


def _descriptors(loading: Loading) -> str:
    """Why there are too few file descriptors."""
    try:
        import resource

        limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = len(os.listdir(_OWN_DESCRIPTORS))
    except (ImportError, OSError):
        return ""  # no such limit, or no telling
    needed = used + loading.descriptors
    if limit in (-1, resource.RLIM_INFINITY) or needed <= limit:
        return ""
    allowed = highest in (-1, resource.RLIM_INFINITY) or highest >= needed
    change = f"run 'ulimit -n {needed}' first" if allowed else f"have the limit raised to {needed} (ulimit -Hn)"
    return (
        f"{loading} may need {needed} "
        f"open files per process, and {limit} are allowed: {change}, or lower data.workers or data.prefetch."
    )


def _cores(loading: Loading) -> str:
    """Why loader processes will take time from one another."""
    cores = available_cores()
    asked = loading.processes * loading.workers
    if asked <= max(cores, loading.processes):
        return ""
    return (
        f"{asked} loader processes (data.workers={loading.workers}) are requested, and {cores} core{'s' * (cores > 1)} "
        "may be used; more processes than cores are no faster: lower data.workers, or leave it to auto."
    )
