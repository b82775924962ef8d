"""How did the run end, in one small file? The keys of ``summary.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from paceline.errors import RunDirectoryError
from paceline.records.events import Status


@dataclass(frozen=True, kw_only=True)
class LedgerFacts:
    """What the ledger proves about the training samples.

    Attributes:
        epochs_complete: Epochs in which every sample was used exactly once (or found to be unreadable).
        duplicates: Uses of a sample beyond the first within an epoch, over all epochs.
        missing: Samples left out of an epoch that is over, over all epochs.
        broken: Times a sample could not be read.
    """

    epochs_complete: int
    duplicates: int
    missing: int
    broken: int = 0


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The outcome of a run, written at every stop.

    Attributes:
        status: ``completed``, ``stopped`` (run the same command to go on) or ``failed``.
        step: Optimizer steps done.
        epoch: Epoch of the last step, counted from 1; 0 before the first step.
        samples: Samples seen in training.
        world_size: Number of processes of the last launch.
        weights_sha256: Digest of the model's weights; None if a run failed whose weights are spread over processes.
        ema_sha256: Digest of the averaged weights; None without EMA.
        metrics: The last evaluation's numbers by name; under ``best`` and ``last`` those evaluations in full.
        train_seconds: Time spent in steps over all launches, without evaluation, saving and starting up.
        total_seconds: Time the processes ran, over all launches.
        throughput_samples_per_second: Over all steps but each launch's warm-up; None if there were no others.
        throughput_tokens_per_second: Likewise, padding left out; None too where samples have no tokens.
        data_wait_fraction: Share of step time spent waiting for data, in [0, 1]; None likewise.
        phase_fractions: Share of each phase of a step, likewise; those that cannot be told are left out.
        mfu: Model FLOPs utilisation at that throughput, in [0, 1]; None where the device's peak or the FLOPs are not
            known.
        peak_memory_bytes: Of the first rank: device memory allocated, or resident memory on a CPU; None where the
            device does not say (Metal).
        parameters: Number of the model's trainable parameters.
        ledger: What the ledger proves; None if it was not counted.
        resumes: How often the run was resumed.
        details: Whatever else is worth keeping.
    """

    status: Status
    step: int
    epoch: int
    samples: int
    world_size: int
    weights_sha256: str | None
    ema_sha256: str | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    train_seconds: float
    total_seconds: float
    throughput_samples_per_second: float | None
    throughput_tokens_per_second: float | None = None
    data_wait_fraction: float | None
    mfu: float | None = None
    peak_memory_bytes: int | None
    parameters: int
    ledger: LedgerFacts | None
    resumes: int = 0
    phase_fractions: Mapping[str, float] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the object written to ``summary.json``."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Summary:
        """Read the object back; keys a later version may have added are ignored.

        Raises:
            RunDirectoryError: If a key is missing.
        """
        known = {name: document[name] for name in (one.name for one in fields(cls)) if name in document}
        ledger = known.get("ledger")
        try:
            known["ledger"] = None if ledger is None else LedgerFacts(**ledger)
            summary = cls(**known)
        except TypeError as error:
            raise RunDirectoryError(f"summary.json is damaged: {error}.") from error
        for name, kind in (("step", int), ("samples", int), ("metrics", Mapping), ("details", Mapping)):
            if not isinstance(found := getattr(summary, name), kind):
                raise RunDirectoryError(f"summary.json is damaged: found {name}={str(found)[:80]}.")
        return summary
