"""What is written down while a run goes on, and when does the host wait for the device to write it?"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from paceline.data.batch import BrokenSample
from paceline.errors import DataError, RunDirectoryError
from paceline.records.events import EvaluationEvent, Event, EventWriter, FinishEvent, IncidentEvent, StepEvent
from paceline.records.ledger import LedgerWriter
from paceline.telemetry.async_tracker import AsyncTracker
from paceline.telemetry.display import Display
from paceline.telemetry.meter import PHASES
from paceline.trainer.kept_answers import write_kept
from paceline.trainer.mirroring import report_mirror
from paceline.trainer.noise import linear_rule_warning
from paceline.trainer.nonfinite import check_loss
from paceline.trainer.slow_ranks import Slowest, SlowRanks, find_slowest, over_ranks

if TYPE_CHECKING:
    from paceline.trainer.evaluate import Evaluation
    from paceline.trainer.run import Run

# How long the end of a run waits for its trackers, all of them together.
_PATIENCE_SECONDS = 30.0
_PATIENCE_WHEN_STOPPED_SECONDS = 10.0
_PATIENCE_AFTER_FAILURE_SECONDS = 2.0


class Recorder:
    """Writes events, feeds trackers and the display. Only the first rank has a writer; all ranks take part."""

    def __init__(
        self, writer: EventWriter | None, ledger: LedgerWriter, trackers: list[AsyncTracker], display: Display
    ) -> None:
        self._writer = writer
        self._ledger = ledger
        self._trackers = trackers
        self._display = display
        self._slow = SlowRanks()
        self._keeps_answers = writer is not None

    def write_step(self, run: Run) -> None:
        """Write a step record: where the host waits for the device, as a plain step does not."""
        with run.clock.span("logging"):
            self._write_step(run)

    def _write_step(self, run: Run) -> None:
        timings = run.clock.drain()
        surprises = self._surprises(run)
        drained = run.window.drain([*(timings[f"{phase}_seconds"] or 0.0 for phase in PHASES), len(surprises)])
        measured = [each[:-1] for each in drained.seconds]
        slowest = find_slowest(measured, waits_in=run.strategy.waits_in)
        details = {} if slowest is None else {f"slowest_{key}": value for key, value in vars(slowest).items()}
        if len(measured) > 1:
            details["rank_seconds"] = over_ranks(measured, untold=run.untold)
        norm = run.window.grad_norm
        plan, progress = run.plan, run.progress
        event = StepEvent(
            **progress.here,
            epoch=plan.epoch_of(progress.position - 1) + 1,
            samples=plan.samples_before(progress.position),
            loss=drained.loss,
            lr=run.courses.at(max(progress.step - 1, 0), max(progress.position - 1, 0)).learning_rate,
            grad_norm=None if norm is None else float(norm),
            grad_scale=run.precision.scale,
            timings={
                **timings,
                **{f"{phase}_seconds": None for phase in run.untold},
                **run.mfu(timings["throughput_samples_per_second"]),
            },
            metrics={
                **({"skipped_steps": progress.skipped} if run.may_skip else {}),
                **({} if plan.noise_scale_every_steps is None else run.noise.for_record()),
            },
            details=details,
        )
        self.write(event)
        self._report_slow(run, slowest)
        if any(each[-1] for each in drained.seconds):
            self._report_recompiles(run, surprises)
        if (message := linear_rule_warning(run)) is not None:
            self.write(IncidentEvent(**run.progress.here, incident="linear_lr_rule", message=message))
        report_mirror(run)
        self.report_broken(run, drained.broken)
        self.flush()
        check_loss(run, drained.loss)

    def write_evaluation(self, run: Run, evaluation: Evaluation, *, seconds: float) -> None:
        """Write one record for each set of weights."""
        train_seconds = run.clock.totals.train_seconds
        for weights, metrics in evaluation.results.items():
            self.write(
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
        self._write_kept(run, evaluation)
        self.report_broken(run, list(evaluation.broken), training=False)
        self.flush()

    def _write_kept(self, run: Run, evaluation: Evaluation) -> None:
        """Write what was kept of the answers; what stands against it is told once, and no reason to end a run."""
        keep = run.evaluator.keep
        if not keep.weights or not self._keeps_answers:
            return
        where = {**run.progress.here, "split": "validation", "weights": keep.weights}
        failure = evaluation.kept.failure
        if not failure:
            try:
                run.directory.check_in_place()
                write_kept(run.directory, evaluation.kept, where)
            except (OSError, RunDirectoryError) as error:
                failure = str(error)
        if failure:
            self._keeps_answers = False
            message = f"the answers of the evaluation are not kept to be looked at: {failure}"
            self.write(IncidentEvent(**run.progress.here, incident="not_kept", message=message))

    def write(self, event: Event) -> None:
        """Write one event everywhere."""
        if self._writer is None:
            return
        document = event.to_json()
        if not isinstance(event, FinishEvent):
            self._append(document)
            self._track(event, [tracker.write(document) for tracker in self._trackers])
            return
        # What comes of the trackers' last records is part of the run's; the end stays the last of them.
        self._track(event, [tracker.write(document) for tracker in self._trackers])
        # A failed run's processes are ended soon, a stopped one's after its job's grace period; and the summary is
        # still to be written.
        patience = {"failed": _PATIENCE_AFTER_FAILURE_SECONDS, "stopped": _PATIENCE_WHEN_STOPPED_SECONDS}
        deadline = time.monotonic() + patience.get(event.status, _PATIENCE_SECONDS)
        self._track(event, [tracker.close(deadline - time.monotonic()) for tracker in self._trackers])
        self._append(document)

    def _append(self, document: dict[str, Any]) -> None:
        assert self._writer is not None
        self._writer.append(document)
        self._display.record(document)

    def _track(self, event: Event, said: list[str]) -> None:
        """Record what is to be told of the trackers, in their order."""
        for tracker, message in zip(self._trackers, said, strict=True):
            if message:
                self.write(
                    IncidentEvent(
                        step=event.step,
                        position=event.position,
                        incident="tracker",
                        message=message,
                        details={"tracker": tracker.name},
                    )
                )

    def flush(self, *, durable: bool = False) -> None:
        """Hand records and ledger to the system; with ``durable``, to the disk."""
        self._ledger.flush(durable=durable)
        if self._writer is not None:
            self._writer.flush(durable=durable)

    def close(self) -> None:
        """Close all files, each whatever the others do."""
        with contextlib.ExitStack() as files:
            for tracker in self._trackers:
                files.callback(tracker.close, _PATIENCE_AFTER_FAILURE_SECONDS)  # which no `finish` has closed
            files.callback(self._ledger.close)
            if self._writer is not None:
                files.callback(self._writer.close)

    @staticmethod
    def _surprises(run: Run) -> list[str]:
        return [each for network in run.compiled.values() for each in network.log.surprises()]

    def _report_recompiles(self, run: Run, reasons: list[str]) -> None:
        """Say what was compiled in vain on any process; a collective."""
        for rank, each in enumerate(run.collectives.gather(reasons)):
            if each:
                message = (
                    f"rank {rank} has compiled the network {len(each)} time{'s' * (len(each) > 1)} more than planned, "
                    f"since what it was compiled for has changed ({each[-1]}), and may do so again."
                )
                details = {"rank": rank, "count": len(each)}
                self.write(IncidentEvent(**run.progress.here, incident="recompile", message=message, details=details))

    def _report_slow(self, run: Run, slowest: Slowest | None) -> None:
        if slowest is None or not self._slow.is_news(slowest):
            return
        message = (
            f"rank {slowest.rank} takes {slowest.factor:.1f} times as long as the others for its own part of a step, "
            f"most of it in {slowest.phase}, and they wait for it."
        )
        details = {"rank": slowest.rank, "phase": slowest.phase}
        self.write(IncidentEvent(**run.progress.here, incident="slow_rank", message=message, details=details))

    def report_broken(self, run: Run, broken: list[BrokenSample], *, training: bool = True) -> None:
        """Write down unreadable samples that were left out.

        Raises:
            DataError: If there are more than ``data.max_broken``.
        """
        known = run.progress.broken_evaluation_ids
        new = broken if training else [each for each in broken if each.id not in known]
        if not training:
            known += [each.id for each in new]
        for each in new:
            self.write(
                IncidentEvent(
                    **run.progress.here,
                    incident="broken_sample",
                    message=f"'{each.path}' could not be read ({each.reason}) and was left out.",
                    details={
                        "path": each.path,
                        "sample": each.id,
                        "split": "train" if training else "validation",
                    },
                )
            )
        count = len(run.window.broken_ids) + len(run.progress.broken_evaluation_ids)
        if new and count > run.recipe.data.max_broken:
            raise DataError(
                f"'{new[-1].path}' could not be read: {new[-1].reason}. {count} broken sample(s) so far, and "
                f"data.max_broken={run.recipe.data.max_broken}; raise that to go on without them, or repair or remove "
                "them and begin in another --run-dir."
            )
