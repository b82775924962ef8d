"""How did it end? The numbers of summary.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.models.digest import weights_sha256
from paceline.records.events import Status
from paceline.records.ledger import count_epochs
from paceline.records.reader import LedgerFacts, Summary
from paceline.telemetry.memory import peak_memory_bytes
from paceline.trainer.nonfinite import divergence

if TYPE_CHECKING:
    from paceline.trainer.run import Run


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
        # A failed run's ledgers may hold part of a step, and the other ranks' may not be on the disk.
        ledger=None if status == "failed" else _ledger(run),
        resumes=progress.resumes,
        details={"ending": ending, **_warning(run, status), **_part_of_data(plan.data)},
    )


def _warning(run: Run, status: Status) -> dict[str, str]:
    warning = divergence(run) if status == "completed" else ""
    return {"warning": warning} if warning else {}


def _part_of_data(data: Mapping[str, Any]) -> dict[str, Any]:
    """What part of its data the run has seen, if not all of it."""
    part = {key: data[key] for key in ("only_classes", "subset", "split_file_sha256") if key in data}
    return {"data": {"digest": data.get("digest"), **part}} if part else {}


def _metrics(run: Run) -> dict[str, Any]:
    """The last evaluation, of the moving average where there is one, then every set of weights and the best."""
    last = run.progress.last
    if not last:
        return {}
    headline = "ema" if "ema" in last else "model"
    return {**last[headline], "weights": headline, "last": last, "best": run.progress.best}


def _ledger(run: Run) -> LedgerFacts:
    over = run.plan.epochs.completed(run.progress.position)
    return count_epochs(run.directory.ledger, run.plan.train_samples, epochs_over=over).facts
