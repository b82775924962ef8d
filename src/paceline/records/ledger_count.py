"""Was each sample used exactly once per epoch? Counted from all ranks' ledger files, an epoch at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import RunDirectoryError
from paceline.records.ledger import LedgerEntry, ledger_files, read_ledger
from paceline.records.summary import LedgerFacts

# Ids gathered before they are counted: bincount's cost is the epoch's size, however few ids it is given.
_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class EpochCount:
    """One epoch over all ranks.

    Attributes:
        epoch: The epoch, counted from 0.
        used: Uses of samples in gradients.
        broken: Samples that could not be read.
        duplicates: Uses, or failed readings, of a sample beyond the first.
        missing: Samples neither used nor found broken.
        is_over: Whether the epoch's every step was taken, so that ``missing`` will not become smaller.
    """

    epoch: int
    used: int
    broken: int
    duplicates: int
    missing: int
    is_over: bool

    @property
    def is_complete(self) -> bool:
        """True if each sample was accounted for exactly once."""
        return self.missing == 0 and self.duplicates == 0


@dataclass(frozen=True, kw_only=True)
class LedgerSummary:
    """All epochs of a run; in the totals an epoch that is not over misses nothing yet."""

    samples_per_epoch: int
    epochs: tuple[EpochCount, ...]

    @property
    def facts(self) -> LedgerFacts:
        """The totals, as they stand in ``summary.json``."""
        return LedgerFacts(
            epochs_complete=sum(one.is_complete for one in self.epochs),
            duplicates=sum(one.duplicates for one in self.epochs),
            missing=sum(one.missing for one in self.epochs if one.is_over),
            broken=sum(one.broken for one in self.epochs),
        )

    def to_json(self) -> dict[str, Any]:
        """Return totals and epochs as one object."""
        epochs = [{**asdict(one), "is_complete": one.is_complete} for one in self.epochs]
        return {**asdict(self.facts), "samples_per_epoch": self.samples_per_epoch, "epochs": epochs}


def count_epochs(directory: Path, samples_per_epoch: int, *, epochs_over: int = 0) -> LedgerSummary:
    """Count every sample of every epoch. Memory: one counter per sample, whatever the length of the run.

    Args:
        directory: The run's ``ledger`` folder.
        samples_per_epoch: Number of training samples; their ids are 0 to one less.
        epochs_over: Epochs whose every step was taken, if known. Without it the last epoch found is taken to
            go on if samples are missing from it.

    Raises:
        RunDirectoryError: If a file is damaged, or holds ids the training set does not have.
    """
    readers = [_Reader(path) for path in ledger_files(directory)]
    epochs: list[EpochCount] = []
    while any(reader.head is not None for reader in readers) or len(epochs) < epochs_over:
        epoch = len(epochs)
        counts, broken = _count(readers, epoch, samples_per_epoch)
        missing = int(np.count_nonzero(counts == 0))
        is_over = epoch < epochs_over or any(reader.head is not None for reader in readers) or missing == 0
        total = int(counts.sum())
        epochs.append(
            EpochCount(
                epoch=epoch,
                used=total - broken,
                broken=broken,
                duplicates=total - (samples_per_epoch - missing),
                missing=missing,
                is_over=is_over,
            )
        )
    return LedgerSummary(samples_per_epoch=samples_per_epoch, epochs=tuple(epochs))


class _Reader:
    """One file, read an epoch at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries = read_ledger(path)
        self.head: LedgerEntry | None = next(self._entries, None)

    def take(self, epoch: int) -> Iterator[LedgerEntry]:
        """Yield the records of one epoch."""
        while self.head is not None and self.head.epoch == epoch:
            yield self.head
            self.head = next(self._entries, None)
        if self.head is not None and self.head.epoch < epoch:
            raise RunDirectoryError(
                f"The ledger '{self.path}' goes back to epoch {self.head.epoch} at step {self.head.step}, "
                f"after epoch {epoch}: two runs have written to it. Start the run in another directory."
            )


def _count(readers: list[_Reader], epoch: int, samples: int) -> tuple[NDArray[np.int64], int]:
    """Count uses and failed readings of each sample in one epoch; also return how many readings failed."""
    counts = np.zeros(samples, dtype=np.int64)
    broken = 0
    for reader in readers:
        chunk: list[NDArray[np.int64]] = []
        size = 0
        for entry in reader.take(epoch):
            chunk += (entry.ids, entry.broken)
            size += entry.ids.size + entry.broken.size
            broken += entry.broken.size
            if size >= _CHUNK:
                _add(counts, chunk, reader.path)
                chunk, size = [], 0
        _add(counts, chunk, reader.path)
    return counts, broken


def _add(counts: NDArray[np.int64], chunk: list[NDArray[np.int64]], path: Path) -> None:
    """Add one to the counter of every id in a chunk."""
    if not chunk:
        return
    ids = np.concatenate(chunk)
    if ids.size and int(ids.max()) >= counts.size:
        raise RunDirectoryError(
            f"The ledger '{path}' holds sample {int(ids.max())}, but the training set has {counts.size} "
            "samples: this run was trained on other data. Name the data set it was trained on."
        )
    counts += np.bincount(ids, minlength=counts.size)
