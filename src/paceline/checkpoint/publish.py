"""Checkpoints during training: when the next one is due by time, the thread that writes it, and what is done there.

Publishing a captured state writes it durably, names the best step, prunes older checkpoints, and then notifies the
subscribers.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.parsing.units import TimeSpan, format_seconds
from paceline.records.reader import read_identity
from paceline.records.run_directory import Identity, RunDirectory, write_identity, write_text

if TYPE_CHECKING:  # so that a thread that writes needs no torch, and a loop without a recipe no pydantic
    from paceline.checkpoint.state import State
    from paceline.checkpoint.store import Best, CheckpointStore, ShardedSave
    from paceline.recipe.running import Checkpoint
    from paceline.recipe.schema import Recipe

_NICENESS = 5  # compute threads have 0: the writer gets about a quarter of a core when both compete for it


class BackgroundWriter:
    """Runs one save at a time in the background; the next call raises its error.

    A save in progress when the interpreter exits is completed first.

    Attributes:
        cancelled: Set to make a save stop waiting for other processes.
        pending: The save that was not waited for yet, if any.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=_lower_priority)
        self.pending: Future[object] | None = None
        self.cancelled = threading.Event()

    def submit(self, save: Callable[[], object]) -> None:
        """Start a save; wait for the previous one first.

        Raises:
            RuntimeError: If the previous save is not finished: both would write from the same copy of the state.
        """
        if self.pending is not None:
            raise RuntimeError("a save is still under way")
        self.pending = self._thread.submit(save)

    @property
    def is_busy(self) -> bool:
        """Whether a save is in progress; never waits."""
        return self.pending is not None and not self.pending.done()

    @property
    def has_failed(self) -> bool:
        """Whether the current save has ended with an error; never waits."""
        return self.pending is not None and self.pending.done() and self.pending.exception() is not None

    def is_over(self, *, within_seconds: float) -> bool:
        """Wait for the current save with a timeout; return whether it has ended. Its error is kept for later."""
        return self.pending is None or bool(wait_for([self.pending], within_seconds).done)

    def raise_if_failed(self) -> None:
        """Raise the error of a failed save; never waits, and keeps the error."""
        if self.has_failed and self.pending is not None:
            self.pending.result()

    def wait(self) -> object:
        """Wait for the current save and return its result, once; None if there is none.

        Raises:
            Exception: The save's own error.
        """
        pending, self.pending = self.pending, None
        return None if pending is None else pending.result()

    def close(self) -> None:
        """End the thread; waits for the current save, and raises its error."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()


def _lower_priority() -> None:
    """Lower the priority of this thread, and of those that it starts; only Linux has a per-thread niceness.

    If all cores compute, each operation of a step waits for the slowest thread, and the step would wait for the writer.
    Code that waits for the writer leaves the cores free for it.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, thread, max(os.getpriority(os.PRIO_PROCESS, thread), _NICENESS))


# With `auto`, before a save has been measured.
_FIRST_SECONDS = 60.0
_MARGIN_SECONDS = 60.0


def job_end_time(environ: Mapping[str, str]) -> float | None:
    """Unix time at which Slurm ends this job, if known."""
    end = environ.get("SLURM_JOB_END_TIME", "")
    return float(end) if end.isdigit() and int(end) > 0 else None


def young_interval(cost_seconds: float, mtbf_seconds: float) -> float:
    """Return the interval between checkpoints, in seconds, that loses the least time to saves and failures.

    First-order optimum of Young (1974), which Daly (2006) refines; the two differ by less than the cost itself as long
    as a save costs much less than the time between failures.

    Args:
        cost_seconds: Training pause per save.
        mtbf_seconds: Mean time between failures of the whole job.
    """
    return math.sqrt(2 * cost_seconds * mtbf_seconds)


class Cadence:
    """Tells the first rank when to request a checkpoint; all ranks then agree on it as they do on a stop.

    Args:
        checkpoint: The recipe's checkpoint section.
        end_time: Unix time at which the job will be ended from outside; None if unknown.
        clock: A monotonic clock in seconds.
    """

    def __init__(
        self, checkpoint: Checkpoint, *, end_time: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._mtbf = checkpoint.mtbf.seconds
        self._is_auto = checkpoint.every == "auto"
        self._is_measured = False
        self._interval = _FIRST_SECONDS if self._is_auto else math.inf
        if isinstance(checkpoint.every, TimeSpan):
            self._interval = checkpoint.every.seconds
        self._saved_at = clock()
        self._write_seconds = 0.0
        self._end_time = None if end_time is None or checkpoint.every is None else clock() + end_time - time.time()

    def is_due(self) -> bool:
        """Whether to save after this step."""
        now = self._clock()
        if self._end_time is not None and now >= self._save_deadline():
            return True
        return now - self._saved_at >= self._interval

    def record_save(self, paused_seconds: float) -> str | None:
        """Record a started save and its training pause; return a message if the interval changes."""
        now = self._clock()
        if self._end_time is not None and now >= self._save_deadline():
            self._end_time = None  # once is enough
        self._saved_at = now
        if not self._is_auto:
            return None
        self._interval = max(young_interval(paused_seconds, self._mtbf), 2 * self._write_seconds)
        if self._is_measured:
            return None
        self._is_measured = True
        return (
            f"a checkpoint pauses training for {format_seconds(paused_seconds)}: saving one every "
            f"{format_seconds(self._interval)} (checkpoint.every=auto)"
        )

    def record_write(self, seconds: float) -> None:
        """Record how long a checkpoint took to reach the disk."""
        self._write_seconds = seconds

    def _save_deadline(self) -> float:
        """Return when a save must begin to be complete before the job is ended."""
        assert self._end_time is not None
        return self._end_time - _MARGIN_SECONDS - 3 * self._write_seconds


@dataclass(frozen=True, kw_only=True)
class LocalCheckpoint:
    """A complete checkpoint on this host, and its records.

    Attributes:
        step: Its step.
        path: Its directory.
        growing: Record files of the run directory by name, with the number of bytes that belong to the checkpoint.
        small: Files of the run directory that are sent completely.
        best: What ``best.json`` says.
    """

    step: int
    path: Path
    growing: Mapping[str, int]
    small: tuple[str, ...]
    best: Best | None = None


@dataclass(frozen=True, kw_only=True)
class Publisher:
    """Publishes the checkpoints of one run; older ones are pruned.

    Attributes:
        store: The run's checkpoints.
        directory: The run directory; its ``run.json`` and ``recipe.yaml`` are written again if they were lost.
        recipe: The run's recipe.
        facts: Facts about the run, for each manifest; ``run`` is its identity.
        file_metadata: Metadata for each weights file.
        cadence: Decides when a checkpoint is due by time.
        patience_seconds: How long processes wait for one another.
        needed: Returns the steps whose checkpoints must not be pruned yet.
        subscribers: Called with each durable checkpoint, in the thread that writes them; must not wait.
    """

    store: CheckpointStore
    directory: RunDirectory
    recipe: Recipe
    facts: Mapping[str, str]
    file_metadata: Mapping[str, str]
    cadence: Cadence
    patience_seconds: float
    needed: Callable[[], Iterable[int]]
    subscribers: Sequence[Callable[[LocalCheckpoint], object]]

    def publish(
        self,
        step: int,
        states: Mapping[str, State],
        facts: Mapping[str, Any],
        *,
        best: Best | None,
        records: tuple[Mapping[str, int], tuple[str, ...]],
        sharded: ShardedSave | None,
    ) -> None:
        """Write a captured state, and prune older checkpoints; on other ranks than the first, write this rank's part.

        Args:
            step: Optimizer steps done.
            states: State by component.
            facts: Facts about the run at this step, for the manifest.
            best: The best step so far, if it is kept.
            records: The run's records at this step: growing ones with their sizes, and small ones.
            sharded: All processes, if each writes its part; None if the first writes alone.

        Raises:
            CheckpointError: If it could not be written; existing checkpoints are untouched.
            RunDirectoryError: If the run directory was moved or removed.
        """
        start, directory = time.perf_counter(), self.directory
        facts = {**self.facts, **facts}
        if sharded is not None and sharded.rank:
            self.store.write_shard(step, states, facts, file_metadata=self.file_metadata, sharded=sharded)
            return
        directory.check_in_place()
        path = self.store.save(step, states, facts, replace=True, file_metadata=self.file_metadata, sharded=sharded)
        directory.check_in_place()
        own = read_identity(directory)
        own = own if own is not None and own.id == self.facts["run"] else Identity(self.facts["run"])
        write_identity(directory, replace(own, has_checkpoint=True))
        if not directory.recipe.exists():  # removed during training: without it, the run cannot be resumed
            from paceline.recipe.load import to_yaml

            directory.check_in_place()  # or the complete directory was moved
            write_text(directory.recipe, to_yaml(self.recipe))
        protect = [*self.store.name_best(best), *self.needed()]
        self.store.prune(keep=self.recipe.checkpoint.keep, protect=protect)
        for each in self.subscribers:
            each(
                LocalCheckpoint(step=step, path=path, growing=records[0], small=records[1], best=self.store.read_best())
            )
        self.cadence.record_write(time.perf_counter() - start)
