"""Save the run's state, and restore it.

A save has two halves: this module captures the state of a step on every rank while training pauses, and
``checkpoint/publish.py`` writes it while training continues.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from functools import partial

from paceline.checkpoint.durable import size_of
from paceline.checkpoint.manifest import read_components
from paceline.checkpoint.store import ResumePoint, ShardedSave, checkpoint_name
from paceline.errors import CheckpointError, TrainingError
from paceline.records.events import CheckpointEvent, ResumeEvent
from paceline.trainer.mirroring import sendable_records, wait_until_copied
from paceline.trainer.nonfinite import check_loss, check_state
from paceline.trainer.saved_run import SavedRun
from paceline.trainer.step_stats import Window


def save_checkpoint(run: SavedRun) -> None:
    """Save every component under the current step; a collective. Does nothing if this state is already saved.

    Training pauses for the copy to host memory; the first rank writes it while training continues.

    Raises:
        CheckpointError: On every rank, if the save before this one has failed.
        RunDirectoryError: On every rank, if the run directory was moved or removed.
    """
    if run.saved_position == run.progress.position:
        return
    start = time.perf_counter()
    with run.clock.paused():
        # First, because a save in progress fails with it and could not report why.
        run.collectives.on_rank_zero(run.directory.check_in_place)
        finish_saving(run)
        run.sync_buffers()
        name = checkpoint_name(run.progress.step)
        if run.mirroring is not None:
            run.mirroring.report(run.recorder)
        run.recorder.write(CheckpointEvent(**run.progress.here, checkpoint=name))
        # Records must reach the disk before the checkpoint that refers to them.
        run.recorder.flush(durable=True)
        # Gather what differs between ranks; for the rest, the first rank's state represents all.
        run.window.gather()
        if not run.is_sharded:
            run.collectives.on_rank_zero(lambda: run.writer.submit(capture(run, None)))
        else:
            staging_dir = run.collectives.on_rank_zero(lambda: run.publisher.store.make_staging_dir(run.progress.step))
            patience = run.publisher.patience_seconds
            sharded = ShardedSave(staging_dir, run.world.rank, run.world.world_size, patience, run.writer.cancelled)
            # No process starts writing until all have captured their state without an error.
            run.writer.submit(run.collectives.on_all_ranks(lambda: capture(run, sharded)))
        run.saved_position, run.saved_name = run.progress.position, name
    if news := run.publisher.cadence.record_save(time.perf_counter() - start):
        run.display.message(news)


def capture(run: SavedRun, sharded: ShardedSave | None) -> Callable[[], None]:
    """Copy the state now, and return the function that publishes it.

    Args:
        run: The run.
        sharded: All processes, if each writes its shards; None if the first writes alone.
    """
    states = run.components.snapshot()
    for loss in Window.losses(states["window"]):
        # Weights behind a non-finite loss must not displace the last good checkpoint.
        check_loss(loss, run)
    check_state(run)
    position = run.progress.position
    facts = {
        "world_size": run.plan.world_size,
        "position": position,
        "samples": run.plan.epochs.samples_before(position),
        "precision": run.plan.precision,
    }
    records = sendable_records(run.directory) if run.mirroring is not None else ({}, ())
    return partial(
        run.publisher.publish, run.progress.step, states, facts, best=run.best, records=records, sharded=sharded
    )


def finish_saving(run: SavedRun) -> None:
    """Wait for a save in progress, as long as it advances; a collective.

    Raises:
        CheckpointError: On every rank, if it has failed.
    """
    # Many short waits, since one collective may not take longer than parallel.timeout, but a save may.
    patience = run.publisher.patience_seconds / 10
    last_state: tuple[int, int] | None = None
    while (state := run.collectives.on_rank_zero(lambda: _save_progress(run, patience))) is not None:
        if state != last_state:
            run.heartbeat.tick()
        last_state = state
        if run.is_sharded:
            # A process that cannot write may not be able to leave a note about it either.
            run.collectives.on_all_ranks(run.writer.raise_if_failed)
    run.collectives.on_rank_zero(run.writer.wait)
    # A failure on another process has failed on the first process too.
    with contextlib.suppress(CheckpointError):
        run.writer.wait()


def _save_progress(run: SavedRun, patience_seconds: float) -> tuple[int, int] | None:
    """Return the signs of progress of a save: the bytes of all checkpoints, and the last change of the run directory.

    Returns:
        None if no save is in progress any more.
    """
    if run.writer.is_over(within_seconds=patience_seconds):
        return None
    return size_of(run.publisher.store.directory), max(
        (os.fstat(part).st_mtime_ns for part in run.directory.descriptors.values()), default=0
    )


def finish_mirroring(run: SavedRun) -> None:
    """Wait for unfinished copies, as long as the recipe allows; a collective.

    Raises:
        TrainingError: On every process, if copying has failed for longer than the recipe allows.
    """
    mirroring, recipe = run.mirroring, run.recipe
    if recipe.checkpoint.mirror is None:
        return
    wait_until_copied(mirroring, recipe, run.collectives, lambda each: each.has_failed, run.heartbeat.tick)

    def report() -> None:
        if mirroring is None:
            return
        checkpoint, root = recipe.checkpoint, run.directory.root
        mirroring.report(run.recorder)
        if mirroring.has_failed:
            raise TrainingError(
                f"checkpoints could not be copied to {checkpoint.mirror} for longer than "
                f"checkpoint.mirror_patience={checkpoint.mirror_patience}; the run is saved in "
                f"'{root}': fix the address and run the same command again."
            )
        if missing := mirroring.problem:
            message = f"the newest checkpoint is in '{root}', but not at {checkpoint.mirror}: {missing}"
            run.recorder.incident("mirror_behind", message)
            run.display.message(message)
            return
        with contextlib.suppress(CheckpointError):
            run.publisher.store.prune(keep=checkpoint.keep, protect=[] if run.best is None else [run.best.step])

    run.collectives.on_rank_zero(report)


def restore(run: SavedRun, choice: ResumePoint, *, resumes: int) -> None:
    """Restore the state of the chosen checkpoint on every rank; ``resumes`` counts the earlier resumes."""
    if choice.path is not None:
        run.components.restore(read_components(choice.path, chunks=run.components.chunks()))
        # The checkpoint does not count resumes that came after it.
        run.progress.resumes = max(run.progress.resumes, resumes) + 1
        run.saved_position, run.saved_name = run.progress.position, choice.path.name
        # A kill between a save and its best.json would have left an older name there.
        run.collectives.on_rank_zero(lambda: run.publisher.store.name_best(run.best))
    for kind, message in choice.incidents:
        run.recorder.incident(kind, message)
    if choice.path is not None:
        run.recorder.write(
            ResumeEvent(
                **run.progress.here,
                checkpoint=choice.path.name,
                resumes=run.progress.resumes,
                world_size=run.plan.world_size,
            )
        )
    run.recorder.flush()
