"""The ledger: samples that each rank trained on, and how often each was used per epoch.

Every rank appends to its own file, ``ledger/rank-00000.ids``. The file is a sequence of records; one record holds the
samples of one micro-batch or one step, little-endian::

    magic "PLED" | bytes per id: u8 | 3 zero bytes | epoch: u32 | step: u64 | ids: u32 | broken ids: u32
    | the ids | the broken ids | CRC-32 of all before it: u32

Appending costs microseconds and never waits for the disk; ``flush(durable=True)`` does, before a checkpoint
becomes visible. A kill can tear the last record: it is ignored when reading and cut off by
:func:`truncate_ledgers`. Damage followed by intact records is not a torn end, and is an error.
"""

from __future__ import annotations

import io
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.errors import RunDirectoryError
from paceline.records.events import AppendFile, detach
from paceline.records.reader import LedgerFacts
from paceline.records.run_directory import file_error, refuse_special_file, write_bytes

_MAGIC = b"PLED"
_HEADER = struct.Struct("<4sB3xIQII")
_CHECKSUM = struct.Struct("<I")
_BUFFER_BYTES = 1 << 18
_NARROW, _WIDE = np.dtype("<u4"), np.dtype("<u8")

Ids = NDArray[np.int64]
_NO_IDS: Ids = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class LedgerEntry:
    """One record.

    Attributes:
        step: Optimizer step that used the samples, as in the events: the first step is 1.
        epoch: Epoch the samples were drawn in, as in the sample order: the first epoch is 0.
        ids: Samples that went into the gradient, int64 [N].
        broken: Samples that could not be read and were left out, int64 [M].
    """

    step: int
    epoch: int
    ids: Ids
    broken: Ids


class LedgerWriter(AppendFile):
    """Appends to one rank's ledger file; call :func:`truncate_ledgers` first when resuming."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, buffering=_BUFFER_BYTES)

    def append(self, *, step: int, epoch: int, ids: ArrayLike, broken: Sequence[int] | Ids = ()) -> None:
        """Record the samples of a micro-batch or a step, if there are any; steps must not decrease."""
        used = np.asarray(ids, dtype=np.int64)
        broken_ids = np.asarray(broken, dtype=np.int64) if len(broken) else _NO_IDS
        if used.size + broken_ids.size:
            self.write(_encode(step, epoch, used, broken_ids))


def ledger_path(directory: Path, rank: int) -> Path:
    """Return the file of one rank."""
    return directory / f"rank-{rank:05d}.ids"


def ledger_files(directory: Path) -> list[Path]:
    """Return the files of all ranks that ever took part, in order of rank."""
    return sorted(directory.glob("rank-*.ids"))


def read_ledger(path: Path) -> Iterator[LedgerEntry]:
    """Yield the records of one rank in order; a torn end is left out.

    Raises:
        RunDirectoryError: If the file cannot be read, or is damaged before its end.
    """
    for _, entry in _records(path):
        yield entry


def truncate_ledgers(directory: Path, step: int) -> int:
    """Cut records after ``step``, and torn ends, from every rank's file; return how many samples are left.

    Call it in one process, before any rank opens its file.

    Raises:
        RunDirectoryError: If a file is damaged before its end, or the disk fails.
    """
    samples = 0
    for path in ledger_files(directory):
        keep = 0
        for end, entry in _records(path):
            if entry.step > step:
                break
            keep = end
            samples += entry.ids.size + entry.broken.size
        try:
            detach(path)
            size = path.stat().st_size
            if keep < size:
                with path.open("r+b") as file:
                    file.truncate(keep)
                    os.fsync(file.fileno())
        except OSError as error:
            raise file_error("truncate", path, error) from error
    return samples


def _encode(step: int, epoch: int, ids: Ids, broken: Ids) -> bytes:
    """Frame one record."""
    all_ids = np.concatenate((ids, broken)) if broken.size else ids
    # Compared as unsigned values, negative ids are larger than any sample's id.
    largest = int(all_ids.view(np.uint64).max())
    if largest >= 1 << 63:
        raise ValueError(f"sample ids must not be negative, found {int(all_ids.min())}")
    dtype = _NARROW if largest < 1 << 32 else _WIDE
    header = _HEADER.pack(_MAGIC, dtype.itemsize, epoch, step, ids.size, broken.size)
    body = header + all_ids.astype(dtype).tobytes()
    return body + _CHECKSUM.pack(zlib.crc32(body))


def _records(path: Path) -> Iterator[tuple[int, LedgerEntry]]:
    """Yield each record with the offset of its end."""
    refuse_special_file(path)
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                yield from _parse(data, path)
    except OSError as error:
        raise file_error("read", path, error) from error


def _parse(data: mmap.mmap, path: Path) -> Iterator[tuple[int, LedgerEntry]]:
    """Walk the records of a mapped file up to its end or its torn end."""
    offset = 0
    while offset < len(data):
        record = _decode(data, offset)
        if record is None:
            if _has_record_after(data, offset):
                raise RunDirectoryError(
                    f"The ledger '{path}' is damaged at byte {offset}: a checksum does not match, and intact records "
                    "follow. The samples used can no longer be proved: restore the file from a "
                    "copy, or start the run in another directory."
                )
            return
        offset = record[0]
        yield record


def _decode(data: mmap.mmap, offset: int) -> tuple[int, LedgerEntry] | None:
    """Return the record at an offset with the offset of its end, or None if there is no complete one."""
    body = offset + _HEADER.size
    if body > len(data):
        return None
    magic, width, epoch, step, used, broken = _HEADER.unpack_from(data, offset)
    checksum = body + width * (used + broken)
    if magic != _MAGIC or width not in (4, 8) or checksum + _CHECKSUM.size > len(data):
        return None
    if zlib.crc32(data[offset:checksum]) != _CHECKSUM.unpack_from(data, checksum)[0]:
        return None
    dtype = _NARROW if width == _NARROW.itemsize else _WIDE
    all_ids = np.frombuffer(data[body:checksum], dtype=dtype).astype(np.int64)
    return checksum + _CHECKSUM.size, LedgerEntry(step, epoch, all_ids[:used], all_ids[used:])


def _has_record_after(data: mmap.mmap, offset: int) -> bool:
    """Whether a complete record begins anywhere after an offset."""
    position = data.find(_MAGIC, offset + 1)
    while position >= 0:
        if _decode(data, position) is not None:
            return True
        position = data.find(_MAGIC, position + 1)
    return False


# Number of ids collected before they are counted: bincount's cost is the epoch's size, however few ids it gets.
_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class EpochCount:
    """One epoch over all ranks.

    Attributes:
        epoch: The epoch, counted from 0.
        used: Uses of samples in gradients.
        broken: Samples that could not be read.
        duplicates: Uses or failed reads of a sample beyond the first, or beyond its draws.
        missing: Samples, or draws, neither used nor found broken.
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
        """Whether each sample, or draw, was accounted for exactly once."""
        return self.missing == 0 and self.duplicates == 0


@dataclass(frozen=True, kw_only=True)
class LedgerSummary:
    """All epochs of a run; in the totals, an unfinished epoch counts no missing samples."""

    samples_per_epoch: int
    epochs: tuple[EpochCount, ...]

    @property
    def facts(self) -> LedgerFacts:
        """Return the totals, as in ``summary.json``."""
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


def count_epochs(
    directory: Path,
    samples_per_epoch: int,
    *,
    epochs_over: int = 0,
    uses: Callable[[int], NDArray[np.int64] | None] = lambda _: None,
) -> LedgerSummary:
    """Count every sample of every epoch. Memory: one counter per sample, whatever the length of the run.

    Args:
        directory: The run's ``ledger`` folder.
        samples_per_epoch: Number of training samples; their ids are 0 to one less.
        epochs_over: Epochs whose every step was taken, if known. Without it, the last epoch found counts as unfinished
            if samples are missing from it.
        uses: How often each sample should appear in an epoch, int64 [samples]; None for once.

    Raises:
        RunDirectoryError: If a file is damaged, or contains ids that the training set does not have.
    """
    readers = [_Reader(path) for path in ledger_files(directory)]
    epochs: list[EpochCount] = []
    while any(reader.head is not None for reader in readers) or len(epochs) < epochs_over:
        epoch = len(epochs)
        counts, broken = _count(readers, epoch, samples_per_epoch)
        expected = uses(epoch)
        missing = int(np.maximum((1 if expected is None else expected) - counts, 0).sum())
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
    """Reads one file, an epoch at a time."""

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
                f"The ledger '{self.path}' returns to epoch {self.head.epoch} at step {self.head.step}, "
                f"after epoch {epoch}: two runs have written to it. Start the run in another directory."
            )


def _count(readers: list[_Reader], epoch: int, samples: int) -> tuple[NDArray[np.int64], int]:
    """Count uses and failed reads of each sample in one epoch; also return how many reads failed."""
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
    """Increment the counter of every id in a chunk."""
    if not chunk:
        return
    ids = np.concatenate(chunk)
    if ids.size and int(ids.max()) >= counts.size:
        raise RunDirectoryError(
            f"The ledger '{path}' holds sample {int(ids.max())}, but the training set has {counts.size} "
            "samples: this run was trained on other data. Name the data set it was trained on."
        )
    counts += np.bincount(ids, minlength=counts.size)


def write_lengths(path: Path, tokens: NDArray[np.int64]) -> None:
    """Write sample lengths as a NumPy file, in the smallest integer dtype that fits.

    Raises:
        RunDirectoryError: If the disk fails.
    """
    content = io.BytesIO()
    np.save(content, tokens.astype(np.min_scalar_type(int(tokens.max(initial=0)))), allow_pickle=False)
    write_bytes(path, content.getvalue())


def read_lengths(path: Path) -> NDArray[np.int64]:
    """Read such a file, int64 [samples].

    Raises:
        RunDirectoryError: If the file is missing or damaged.
    """
    refuse_special_file(path)
    try:
        lengths = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise RunDirectoryError(f"the per-sample values cannot be read from '{path}': {error}.") from error
    if not isinstance(lengths, np.ndarray) or lengths.ndim != 1 or lengths.dtype.kind not in "iu":
        raise RunDirectoryError(f"'{path}' must hold one row of whole numbers, one for each sample.")
    return lengths.astype(np.int64)
