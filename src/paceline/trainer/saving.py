"""Save the run's state, and restore it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from paceline.checkpoint.manifest import read_components
from paceline.checkpoint.mirror import LocalCheckpoint
from paceline.checkpoint.store import Best, ResumePoint, SavedCheckpoint, ShardedSave, checkpoint_name
from paceline.errors import CheckpointError, TrainingError
from paceline.recipe.load import recipe_digest, to_yaml
from paceline.records.events import CheckpointEvent, ResumeEvent
from paceline.records.reader import Identity, write_identity
from paceline.records.run_directory import write_text
from paceline.trainer.mirroring import report_mirror, sendable_records, wait_until_copied
from paceline.trainer.nonfinite import check_loss, check_state
from paceline.trainer.run import Run
from paceline.trainer.step_stats import Window
from paceline.version import __version__


def save_checkpoint(run: Run) -> None:
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
        run.strategy.sync_buffers(list(run.models().values()))
        name = checkpoint_name(run.progress.step)
        report_mirror(run.mirroring, run.recorder)
        run.recorder.write(CheckpointEvent(**run.progress.here, checkpoint=name))
        # Records must reach the disk before the checkpoint that refers to them.
        run.recorder.flush(durable=True)
        # Gather what differs between ranks; for the rest, the first rank's state represents all.
        run.window.gather()
        if not run.strategy.is_sharded:
            run.collectives.on_rank_zero(lambda: run.writer.submit(_prepare_write(run, None)))
        else:
            staging_dir = run.collectives.on_rank_zero(lambda: run.checkpoints.make_staging_dir(run.progress.step))
            patience = run.recipe.parallel.timeout.seconds
            sharded = ShardedSave(staging_dir, run.world.rank, run.world.world_size, patience, run.writer.cancelled)
            # No process starts writing until all have captured their state without an error.
            run.writer.submit(run.collectives.on_all_ranks(lambda: _prepare_write(run, sharded)))
        run.saved_position, run.saved_name = run.progress.position, name
    if news := run.cadence.record_save(time.perf_counter() - start):
        run.display.message(news)


def finish_saving(run: Run) -> None:
    """Wait for a save in progress, as long as it advances; a collective.

    Raises:
        CheckpointError: On every rank, if it has failed.
    """
    # Many short waits, since one collective may not take longer than parallel.timeout, but a save may.
    patience = run.recipe.parallel.timeout.seconds / 10
    last_state: tuple[int, int] | None = None
    while (state := run.collectives.on_rank_zero(lambda: _save_progress(run, patience))) is not None:
        if state != last_state:
            run.heartbeat.tick()
        last_state = state
        if run.strategy.is_sharded:
            # A process that cannot write may not be able to leave a note about it either.
            run.collectives.on_all_ranks(run.writer.raise_if_failed)
    run.collectives.on_rank_zero(run.writer.wait)
    # A failure on another process has failed on the first process too.
    with contextlib.suppress(CheckpointError):
        run.writer.wait()


def _save_progress(run: Run, patience_seconds: float) -> tuple[int, int] | None:
    """Return the signs of progress of a save: the bytes of all checkpoints, and the last change of the run directory.

    Returns:
        None if no save is in progress any more.
    """
    if run.writer.is_over(within_seconds=patience_seconds):
        return None
    return run.checkpoints.size_bytes(), max(
        (os.fstat(part).st_mtime_ns for part in run.directory.descriptors.values()), default=0
    )


def _prepare_write(run: Run, sharded: ShardedSave | None) -> Callable[[], SavedCheckpoint | None]:
    """Copy the state now, and return the function that writes it.

    Args:
        run: The run.
        sharded: All processes, if each writes its shards; None if the first writes alone.
    """
    states = run.components.snapshot()
    for loss in Window.losses(states["window"]):
        # Weights behind a non-finite loss must not displace the last good checkpoint.
        check_loss(loss, run.recorder, run.last_good)
    check_state(run.models(), run.recorder, run.last_good)
    step, position, best, mirroring = run.progress.step, run.progress.position, dict(run.progress.best), run.mirroring
    facts = {
        "version": __version__,
        "run": run.identity,
        "recipe_sha256": recipe_digest(run.recipe),
        "world_size": run.plan.world_size,
        "position": position,
        "samples": run.plan.samples_before(position),
        "precision": run.plan.precision,
    }
    if sharded is not None and not run.world.is_first:
        return partial(
            run.checkpoints.write_shard, step, states, facts, file_metadata=run.file_metadata, sharded=sharded
        )
    growing, small = sendable_records(run.directory) if mirroring is not None else ({}, ())

    def write() -> SavedCheckpoint:
        start, store = time.perf_counter(), run.checkpoints
        run.directory.check_in_place()
        saved = store.save(step, states, facts, replace=True, file_metadata=run.file_metadata, sharded=sharded)
        run.directory.check_in_place()
        write_identity(run.directory, Identity(run.identity, has_checkpoint=True))
        if not run.directory.recipe.exists():  # removed during training: without it, the run cannot be resumed
            run.directory.check_in_place()  # or the complete directory was moved
            write_text(run.directory.recipe, to_yaml(run.recipe))
        protect = [*_note_best(run, best), *(mirroring.needed if mirroring is not None else ())]
        store.prune(keep=run.recipe.checkpoint.keep, protect=protect)
        if mirroring is not None:
            mirroring.submit(
                LocalCheckpoint(step=step, path=saved.path, growing=growing, small=small, best=store.read_best())
            )
        run.cadence.record_write(time.perf_counter() - start)
        return saved

    return write


def _note_best(run: Run, best: Mapping[str, Any]) -> list[int]:
    """Name the best step that has a checkpoint in best.json; returns it as the one to protect.

    Without such a step the file is removed: it may name a step that the run has undone and will repeat.
    """
    store = run.checkpoints
    if not best or not run.recipe.checkpoint.keep_best or best["step"] not in store.steps():
        store.delete_best()
        return []
    store.write_best(Best(best["step"], best["metric"], best["value"], best["weights"]))
    return [best["step"]]


def finish_mirroring(run: Run) -> None:
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
        report_mirror(mirroring, run.recorder)
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
        best = [run.progress.best["step"]] if run.progress.best and checkpoint.keep_best else []
        with contextlib.suppress(CheckpointError):
            run.checkpoints.prune(keep=checkpoint.keep, protect=best)

    run.collectives.on_rank_zero(report)


def restore(run: Run, choice: ResumePoint, *, resumes: int) -> None:
    """Restore the state of the chosen checkpoint on every rank; ``resumes`` counts the earlier resumes."""
    if choice.path is not None:
        run.components.restore(read_components(choice.path, chunks=run.components.chunks()))
        # The checkpoint does not count resumes that came after it.
        run.progress.resumes = max(run.progress.resumes, resumes) + 1
        run.saved_position, run.saved_name = run.progress.position, choice.path.name
        # A kill between a save and its best.json would have left an older name there.
        run.collectives.on_rank_zero(lambda: _note_best(run, run.progress.best))
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
