"""Check the resources of a run's loader processes: shared memory, file descriptors, cores.

This runs before anything starts. Otherwise a full /dev/shm kills a worker with a bus error, or a lack of file
descriptors ends the run, after minutes and with messages that do not name the cause.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from paceline.host.machine import available_cores
from paceline.parsing.units import format_bytes

SHARED_MEMORY = Path("/dev/shm")

_OWN_DESCRIPTORS = Path("/proc/self/fd")
# In the training process: pipes and sentinel of a worker, and two tensors of each queued batch.
_DESCRIPTORS_PER_WORKER = 6
_DESCRIPTORS_PER_BATCH = 2
# Logs, checkpoints, trackers, a process group's sockets.
_DESCRIPTORS_BESIDE = 64
# Semaphores of torch's queues and its event, which take a page each, and the page of the samples being read.
_PAGES_PER_SPLIT = 9
_PAGES_PER_WORKER = 3


@dataclass(frozen=True, kw_only=True)
class Loading:
    """Resources that a run needs on one machine to load its batches.

    Attributes:
        processes: Number of ranks on this machine.
        workers: Loader processes per rank and split.
        prefetch: Batches to prefetch per loader process.
        train_batch_bytes: Size of one loaded training micro-batch; 0 without training.
        evaluation_batch_bytes: Size of one evaluation batch; 0 without evaluation.
    """

    processes: int
    workers: int
    prefetch: int
    train_batch_bytes: int
    evaluation_batch_bytes: int = 0

    @property
    def least_bytes(self) -> int:
        """Minimum shared memory: one training batch per loader process, or one evaluation batch without training."""
        return self._shared_bytes(1, self.train_batch_bytes or self.evaluation_batch_bytes)

    @property
    def most_bytes(self) -> int:
        """Maximum shared memory: full queues everywhere; training batches stay queued during an evaluation."""
        return self._shared_bytes(self.prefetch, self.train_batch_bytes, self.evaluation_batch_bytes)

    def _shared_bytes(self, count: int, *batches: int) -> int:
        """Return the shared memory for ``count`` batches of each size, with their labels, and for the queues."""
        pages = sum(-(-size // mmap.PAGESIZE) + 1 for size in batches if size) * count * self.workers
        pages += self._splits * (_PAGES_PER_SPLIT + _PAGES_PER_WORKER * self.workers)
        return self.processes * pages * mmap.PAGESIZE

    @property
    def _splits(self) -> int:
        return (self.train_batch_bytes > 0) + (self.evaluation_batch_bytes > 0)

    @property
    def descriptors(self) -> int:
        """File descriptors that one rank needs for its queued batches."""
        each = _DESCRIPTORS_PER_WORKER + _DESCRIPTORS_PER_BATCH * self.prefetch
        return self._splits * self.workers * each + _DESCRIPTORS_BESIDE

    def __str__(self) -> str:
        count = self.processes * self.workers
        said = f"data.workers={self.workers}, data.prefetch={self.prefetch}"
        return f"{count} loader process{'es' * (count > 1)} ({said})"


@dataclass(frozen=True)
class Findings:
    """Obstacles to a run on this machine.

    Attributes:
        refusal: Why the run cannot work, and what to change; empty if it can.
        warnings: Possible failures and slowdowns, and what to change.
    """

    refusal: str = ""
    warnings: tuple[str, ...] = ()


def check_machine(loading: Loading, shared_memory: Path = SHARED_MEMORY) -> Findings:
    """Compare a run's requirements with this process's limits.

    Args:
        loading: The requirements.
        shared_memory: Path of the system's shared memory.
    """
    memory, tight = _shared_memory(loading, shared_memory)
    return Findings(memory or _descriptors(loading), tuple(each for each in (tight, _cores(loading)) if each))


def _shared_memory(loading: Loading, path: Path) -> tuple[str, str]:
    """Return the error and the warning about too little shared memory."""
    try:
        status = os.statvfs(path)
    except (OSError, AttributeError):
        return "", ""  # a system that keeps it elsewhere
    if not os.access(path, os.W_OK):
        return (
            f"{loading} hand over batches in shared memory, and {path} "
            "cannot be written to: mount it writable, or set data.workers=0."
        ), ""
    free = status.f_bavail * status.f_frsize
    size = "batch.micro_size" if loading.train_batch_bytes else "evaluate.batch_size"
    change = (
        # With a 50 % margin, in Docker's notation.
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
    """Return the error about too few file descriptors."""
    try:
        import resource

        limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = len(os.listdir(_OWN_DESCRIPTORS))
    except (ImportError, OSError):
        return ""  # there is no such limit, or it is unknown
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
    """Return the warning about loader processes that compete for cores."""
    cores = available_cores()
    requested = loading.processes * loading.workers
    if requested <= max(cores, loading.processes):
        return ""
    return (
        f"{requested} loader processes (data.workers={loading.workers}) are requested, and "
        f"{cores} core{'s' * (cores > 1)} may be used; more processes than cores are no faster: "
        "lower data.workers, or leave it to auto."
    )
