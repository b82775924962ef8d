"""The records of a run: its steps, evaluations, incidents and summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.weights import weights_sha256
from paceline.data.batch import Batch, BrokenSample, ReadAhead, select_rows
from paceline.errors import DataError, RunDirectoryError
from paceline.metrics.answers import as_png, thumbnails
from paceline.parsing.plain_text import utf8
from paceline.parsing.units import counted
from paceline.records.events import EvaluationEvent, ObservationEvent, Status, StepEvent
from paceline.records.ledger import count_epochs
from paceline.records.reader import Summary, read_identity
from paceline.records.run_directory import encode_json, write_text
from paceline.telemetry.clock import peak_memory_bytes
from paceline.telemetry.meter import PHASES
from paceline.trainer.evaluate import Evaluation, evaluation_mode, write_artifacts
from paceline.trainer.nonfinite import check_loss, divergence
from paceline.trainer.process_settings import restore_random_states
from paceline.trainer.recorder import find_slowest, summarize_ranks
from paceline.trainer.run_views import RecordedRun
from paceline.trainer.saved_run import SavedRun

# Samples of the first batch shown in the report.
_MAX_SHOWN = 12


def write_step(run: RecordedRun) -> None:
    """Write a step record: here the host waits for the device, which an ordinary step does not."""
    with run.clock.span("logging"):
        run.collectives.on_rank_zero(partial(run.directory.check_in_place, before_saving=False))
        _write_step(run)


def _write_step(run: RecordedRun) -> None:
    timings = run.clock.drain()
    recompilations = [each for network in run.compiled.values() for each in network.log.surprises()]
    # The number of avoidable recompilations is sent as the last value.
    totals = run.window.drain([*(timings[f"{phase}_seconds"] or 0.0 for phase in PHASES), len(recompilations)])
    measured = [each[:-1] for each in totals.seconds]
    slowest = find_slowest(measured, blocking=run.strategy.blocking_phases)
    kept = ("rank", "phase", "factor")
    details = {} if slowest is None else {f"slowest_{key}": getattr(slowest, key) for key in kept}
    if len(measured) > 1:
        details["rank_seconds"] = summarize_ranks(measured, excluded=run.unmeasured)
    norm = run.window.grad_norm
    plan, progress = run.plan, run.progress
    event = StepEvent(
        **progress.here,
        epoch=plan.epoch_of(progress.position - 1) + 1,
        samples=plan.samples_before(progress.position),
        loss=totals.loss,
        lr=run.schedules.at(max(progress.step - 1, 0), max(progress.position - 1, 0)).learning_rate,
        grad_norm=None if norm is None else float(norm),
        grad_scale=run.precision.scale,
        timings={
            **timings,
            **{f"{phase}_seconds": None for phase in run.unmeasured},
            **run.mfu(timings["throughput_samples_per_second"]),
        },
        metrics={
            **totals.logged,
            **({"skipped_steps": progress.skipped} if run.may_skip else {}),
            **{name: value for each in run.listeners for name, value in each.for_record().items()},
        },
        details=details,
    )
    for found in (found for each in run.listeners for found in each.events()):
        run.recorder.write(found)
    run.recorder.write(event)
    if slowest is not None and run.recorder.slow_ranks.is_new(slowest, progress.step):
        message = (
            f"rank {slowest.rank} takes {slowest.factor:.1f} times as long as the others for its own part of a step, "
            f"most of it in {slowest.phase}, and the others wait for it."
        )
        run.recorder.incident("slow_rank", message, {"rank": slowest.rank, "phase": slowest.phase})
    if any(each[-1] for each in totals.seconds):
        for rank, reasons in enumerate(run.collectives.gather(recompilations)):
            if reasons:
                message = (
                    f"rank {rank} has compiled the network {counted(len(reasons), 'time')} more than planned, because "
                    f"its inputs or state changed ({reasons[-1]}), and may do so again."
                )
                run.recorder.incident("recompile", message, {"rank": rank, "count": len(reasons)})
    for kind, message in (found for each in run.listeners for found in each.incidents().items()):
        run.recorder.incident(kind, message)
    if run.mirroring is not None:
        run.mirroring.report(run.recorder)
    report_broken(run, totals.broken)
    run.recorder.flush()
    check_loss(totals.loss, run)


def write_evaluation(run: RecordedRun, evaluation: Evaluation, *, seconds: float) -> None:
    """Write one record for each set of weights."""
    run.collectives.on_rank_zero(partial(run.directory.check_in_place, before_saving=False))
    train_seconds = run.clock.totals.train_seconds
    for weights, metrics in evaluation.results.items():
        run.recorder.write(
            EvaluationEvent(
                **run.progress.here,
                epoch=run.plan.epoch_of(run.progress.position - 1) + 1,
                split="validation",
                weights="ema" if weights == "ema" else "model",
                samples=evaluation.samples,
                seconds=seconds,
                train_seconds=train_seconds,
                metrics=metrics,
                inputs=evaluation.inputs,
            )
        )
    for each in run.listeners:
        if details := each.for_evaluation(evaluation):
            run.recorder.write(ObservationEvent(**run.progress.here, split="validation", details=details))
    _write_artifacts(run, evaluation)
    _keep_figures(run)
    report_broken(run, list(evaluation.broken), training=False)
    run.recorder.flush()


def _write_artifacts(run: RecordedRun, evaluation: Evaluation) -> None:
    """Write what was kept of the answers; a problem is reported once and does not end the run."""
    options = run.evaluator.keep
    if not options.weights or not run.recorder.saves_examples:
        return
    context = {**run.progress.here, "split": "validation", "weights": options.weights}
    failure = evaluation.artifacts.failure
    if not failure:
        try:
            write_artifacts(run.directory, evaluation.artifacts, context)
        except (OSError, RunDirectoryError, TypeError, ValueError) as error:
            failure = str(error)
    if failure:
        run.recorder.saves_examples = False
        run.recorder.incident("not_kept", f"examples of the evaluation are not saved: {failure}")


def report_broken(run: RecordedRun, broken: list[BrokenSample], *, training: bool = True) -> None:
    """Record unreadable samples that were left out; a collective.

    Raises:
        DataError: If there are more than the recipe allows.
    """
    known_ids = run.progress.broken_evaluation_ids
    new = broken if training else [each for each in broken if each.id not in known_ids]
    if not training:
        known_ids += [each.id for each in new]
    for each in new:
        run.recorder.incident(
            "broken_sample",
            f"'{each.path}' could not be read ({each.reason}) and was left out.",
            {"path": each.path, "sample": each.id, "split": "train" if training else "validation"},
        )
    if not new:
        return
    # Between two step records, each process knows only the samples that it read itself.
    training_ids: set[int] = set().union(*run.collectives.gather(run.window.broken_ids))
    count, data = len(training_ids) + len(known_ids), run.recipe.data
    limit = data.unread_limit(run.plan.train_samples + run.plan.evaluation_samples)
    if count > limit:
        problem = f"'{new[-1].path}' could not be read: {new[-1].reason}. {count} broken sample(s) so far, and"
        advice = (
            f"data.max_broken={limit}; the same command with data.max_broken={count} continues without them, or repair "
            "or remove them and begin in another run directory."
        )
        if data.on_bad == "skip":
            advice = (
                f"data.on_bad=skip leaves out {limit} after the start: 1 % of all, and at least 10. More suggests a "
                "failing disk rather than broken files; the same command resumes once the disk works."
            )
        raise DataError(f"{problem} {advice}")


def digests(run: SavedRun) -> dict[str, str]:
    """Return a digest of each set of weights; a collective if they are sharded."""
    return {name: weights_sha256(network.state_dict()) for name, network in run.models().items()}


def summarise(run: SavedRun, status: Status, ending: str, sha256: Mapping[str, str]) -> Summary:
    """Collect the outcome; on the first rank, once all ranks' ledgers are on the disk.

    Args:
        run: The run.
        status: How the run ended.
        ending: Why: ``duration``, ``until``, ``patience``, ``signal`` or ``error``.
        sha256: The result of :func:`digests`.
    """
    plan, progress = run.plan, run.progress
    clock = run.clock.totals
    # A failed run's ledgers may hold part of a step, and those of other ranks may not be on disk.
    ledger = None
    if status != "failed":
        over = plan.epochs.completed(progress.position)
        counted = count_epochs(
            *(run.directory.ledger, plan.train_samples),
            epochs_over=over,
            order=run.geometry.ids_at,
            is_drawn=run.geometry.draws is not None,
        )
        ledger = counted.facts
    warning = divergence(run) if status == "completed" else ""
    details: dict[str, Any] = {"run": run.identity, "ending": ending, **({"warning": warning} if warning else {})}
    # The fraction of its data that the run has seen, if not all of it.
    if part := {key: plan.data[key] for key in ("only_classes", "subset", "split_file_sha256") if key in plan.data}:
        details["data"] = {"digest": plan.data.get("digest"), **part}
    metrics: dict[str, Any] = {}
    if last := progress.last:  # of the moving average where there is one, then every set of weights and the best
        headline = "ema" if "ema" in last else "model"
        metrics = {**last[headline], "weights": headline, "last": last, "best": progress.best}
    return Summary(
        status=status,
        step=progress.step,
        epoch=0 if progress.position == 0 else plan.epoch_of(progress.position - 1) + 1,
        samples=plan.samples_before(progress.position),
        world_size=plan.world_size,
        weights_sha256=sha256.get("model"),
        ema_sha256=sha256.get("ema"),
        metrics=metrics,
        train_seconds=clock.train_seconds,
        total_seconds=progress.total_seconds,
        throughput_samples_per_second=clock.throughput_samples_per_second,
        throughput_tokens_per_second=clock.throughput_tokens_per_second,
        data_wait_fraction=clock.data_wait_fraction,
        phase_fractions={name: share for name, share in clock.phase_fractions.items() if name not in run.unmeasured},
        mfu=run.mfu(clock.throughput_samples_per_second).get("mfu"),
        peak_memory_bytes=peak_memory_bytes(run.device.type),
        parameters=plan.parameters or 0,
        ledger=ledger,
        resumes=progress.resumes,
        parent=None if (own := read_identity(run.directory)) is None else own.parent,
        details=details,
    )


def keep_first_batch(run: RecordedRun, batches: Iterator[Batch]) -> Iterator[Batch]:
    """Keep the first samples of a run's very first batch for the report, and return the stream unchanged."""
    ahead = ReadAhead(batches)
    is_shown = run.recipe.telemetry.report and run.recipe.evaluate.keep_examples and not run.world.rank
    if run.progress.position or not is_shown or not (first := ahead.read()):
        return ahead.replay()
    rows = range(min(_MAX_SHOWN, count := len(first.ids)))
    try:
        inputs, targets = (select_rows(each, rows, size=count) for each in (first.inputs, first.targets))
        pictures = run.task.shown(replace(first, inputs=inputs, targets=targets, ids=first.ids[: len(rows)]))
        names = [utf8(run.pipeline.sample_name(sample, training=True)) for sample in first.ids.tolist()]
        _write_pictures(run.directory.first_batch, pictures, names)
    except Exception as error:  # noqa: BLE001  # pictures must not end a run
        run.display.message(f"The first batch is not shown in the report ({type(error).__name__}: {error}).")
    return ahead.replay()


def _keep_figures(run: RecordedRun) -> None:
    """Keep what the evaluated model draws or writes, for the report, on the first process."""
    if run.world.rank or run.strategy.is_sharded or not run.recipe.telemetry.report:
        return
    model = run.scored.get("ema", run.scored["model"])
    try:
        with (
            evaluation_mode(run.models().values()),
            restore_random_states(run.device.type),
            torch.no_grad(),
            run.precision.keeping_casts(),
        ):
            torch.manual_seed(run.recipe.seed)
            figures = run.task.figures(run.task.evaluated(run.precision.applied_to(model)))
        _write_pictures(run.directory.figures, figures, [caption for _, caption in figures])
        for figure, caption in figures:
            if isinstance(figure, str):
                run.display.message(f"  {caption!r} → {figure!r}")
    except Exception as error:  # noqa: BLE001  # pictures must not end a run
        run.display.message(f"The task's figures are not shown in the report ({type(error).__name__}: {error}).")


def _write_pictures(path: Path, shown: Sequence[tuple[torch.Tensor | str, str]], names: Sequence[str]) -> None:
    entries = [
        {
            **(
                {"text": utf8(each)}
                if isinstance(each, str)
                else {"image": as_png(thumbnails(each[None])[0].permute(1, 2, 0).cpu().numpy())}
            ),
            "caption": utf8(caption),
            "name": utf8(name),
        }
        for (each, caption), name in zip(shown, names, strict=False)
    ]
    if entries:
        path.parent.mkdir(exist_ok=True)
        write_text(path, encode_json({"examples": entries}) + "\n")
