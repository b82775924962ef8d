"""Write a run's records and its summary."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline.checkpoint.weights import weights_sha256
from paceline.data.batch import BrokenSample
from paceline.errors import DataError, RunDirectoryError
from paceline.records.events import EvaluationEvent, Event, EventWriter, FinishEvent, IncidentEvent, Status, StepEvent
from paceline.records.ledger import LedgerWriter, count_epochs
from paceline.records.reader import Summary
from paceline.telemetry.async_tracker import AsyncTracker
from paceline.telemetry.display import Display
from paceline.telemetry.memory import peak_memory_bytes
from paceline.telemetry.meter import PHASES
from paceline.trainer.evaluate import write_kept
from paceline.trainer.mirroring import report_mirror
from paceline.trainer.noise import linear_rule_warning
from paceline.trainer.nonfinite import check_loss, divergence

if TYPE_CHECKING:
    from paceline.trainer.evaluate import Evaluation
    from paceline.trainer.run import Run

# The slowest process shows in the parts of the step in which nobody waits; in an exchange the others wait for it.
# In these all wait for one another, and one of them writes.
_SHARED = ("communication", "logging")
_OWN = tuple(index for index, phase in enumerate(PHASES) if phase not in _SHARED)

ALARMING_FACTOR = 1.5
ALARMING_RECORDS = 3


@dataclass(frozen=True)
class Slowest:
    """The process whose own work took longest since the last record.

    Attributes:
        rank: Its number.
        phase: Where it exceeds the others most.
        factor: Its seconds per step in work of its own, over the median of the others'.
    """

    rank: int
    phase: str
    factor: float


def find_slowest(seconds: Sequence[Sequence[float]], *, waits_in: Collection[str]) -> Slowest | None:
    """Find it from each process's mean seconds per step and phase, in the order of ``PHASES``.

    Args:
        seconds: By rank and phase.
        waits_in: Phases in which processes wait for one another, because they exchange gradients or weights there.
            Of these the shortest one counts for all, since who comes last does not wait.

    Returns:
        None for a single process, and where nothing was measured.
    """
    if len(seconds) < 2:
        return None
    shortest = {phase: min(each[phase] for each in seconds) for phase in _OWN if PHASES[phase] in waits_in}
    own = [[shortest.get(phase, each[phase]) for phase in _OWN] for each in seconds]
    totals = [sum(each) for each in own]
    rank = max(range(len(own)), key=lambda number: totals[number])
    others = [number for number in range(len(own)) if number != rank]
    usual = median(totals[number] for number in others)
    if usual <= 0:
        return None
    excess = [own[rank][part] - median(own[number][part] for number in others) for part in range(len(own[rank]))]
    phase = PHASES[_OWN[excess.index(max(excess))]]
    return Slowest(rank, phase, totals[rank] / usual)


def over_ranks(seconds: Sequence[Sequence[float]], *, untold: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """How much the processes differ: for each phase the least, the middle and the most seconds, and whose these are.

    Args:
        seconds: By rank and phase, as for :func:`find_slowest`.
        untold: Phases to leave out.
    """
    found = {}
    for index, phase in enumerate(PHASES):
        values = [each[index] for each in seconds]
        least, most = min(values), max(values)
        found[phase] = {
            "minimum": least,
            "median": median(values),
            "maximum": most,
            "least_rank": values.index(least),
            "most_rank": values.index(most),
        }
    return {phase: each for phase, each in found.items() if phase not in untold}


class SlowRanks:
    """Remembers for how many records in a row a process was alarmingly slow, and says so once."""

    def __init__(self) -> None:
        self._rank: int | None = None
        self._records = 0
        self._told: set[int] = set()

    def is_news(self, slowest: Slowest | None) -> bool:
        """Take what a record found; whether it is to be told."""
        rank = slowest.rank if slowest is not None and slowest.factor > ALARMING_FACTOR else None
        self._records = self._records + 1 if rank == self._rank else 1
        self._rank = rank
        if rank is None or rank in self._told or self._records < ALARMING_RECORDS:
            return False
        self._told.add(rank)
        return True


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
            lr=run.schedules.at(max(progress.step - 1, 0), max(progress.position - 1, 0)).learning_rate,
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


def digests(run: Run) -> dict[str, str]:
    """Digest of each set of weights; a collective if they are spread over processes."""
    return {name: weights_sha256(network.state_dict()) for name, network in run.models().items()}


def summarise(run: Run, status: Status, ending: str, sha256: Mapping[str, str]) -> Summary:
    """Collect the outcome; on the first rank, once all ranks' ledgers are on the disk.

    Args:
        run: The run.
        status: How it is left.
        ending: Why: ``duration``, ``until``, ``patience``, ``signal`` or ``error``.
        sha256: What :func:`digests` gives.
    """
    plan, progress = run.plan, run.progress
    clock = run.clock.totals
    # A failed run's ledgers may hold part of a step, and the other ranks' may not be on the disk.
    ledger = None
    if status != "failed":
        over = plan.epochs.completed(progress.position)
        ledger = count_epochs(run.directory.ledger, plan.train_samples, epochs_over=over).facts
    warning = divergence(run) if status == "completed" else ""
    details: dict[str, Any] = {"ending": ending, **({"warning": warning} if warning else {})}
    # What part of its data the run has seen, if not all of it.
    if part := {key: plan.data[key] for key in ("only_classes", "subset", "split_file_sha256") if key in plan.data}:
        details["data"] = {"digest": plan.data.get("digest"), **part}
    return Summary(
        status=status,
        step=progress.step,
        epoch=0 if progress.position == 0 else plan.epoch_of(progress.position - 1) + 1,
        samples=plan.samples_before(progress.position),
        world_size=plan.world_size,
        weights_sha256=sha256.get("model"),
        ema_sha256=sha256.get("ema"),
        metrics=_metrics(run),
        train_seconds=clock.train_seconds,
        total_seconds=progress.total_seconds,
        throughput_samples_per_second=clock.throughput_samples_per_second,
        throughput_tokens_per_second=clock.throughput_tokens_per_second,
        data_wait_fraction=clock.data_wait_fraction,
        phase_fractions={name: share for name, share in clock.phase_fractions.items() if name not in run.untold},
        mfu=run.mfu(clock.throughput_samples_per_second).get("mfu"),
        peak_memory_bytes=peak_memory_bytes(run.device.type),
        parameters=plan.parameters or 0,
        ledger=ledger,
        resumes=progress.resumes,
        details=details,
    )


def _metrics(run: Run) -> dict[str, Any]:
    """The last evaluation, of the moving average where there is one, then every set of weights and the best."""
    last = run.progress.last
    if not last:
        return {}
    headline = "ema" if "ema" in last else "model"
    return {**last[headline], "weights": headline, "last": last, "best": run.progress.best}
