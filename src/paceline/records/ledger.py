"""The ledger: samples that each rank trained on, and how often each was used per epoch.

Every rank appends to its own file, ``ledger/rank-00000.ids``. The file is a sequence of records, little-endian::

    magic "PLED" | bytes per id: u32 | epoch: u32 | step: u64 | ids: u32 | broken ids: u32
    | the ids | the broken ids | CRC-32 of all before it: u32

Samples that are those of the epoch's order are recorded as a position: bytes per id is then 0, and instead of the ids
follow the position of the first, u64, and a digest of the ids that were used, 8 bytes (:func:`digest_of`). One such
record holds a rank's samples of one step; one with ids, those of one micro-batch.

Appending costs microseconds and never waits for the disk; ``flush(durable=True)`` does, before a checkpoint
becomes visible. A kill can tear the last record: it is ignored when reading and cut off by
:func:`truncate_ledgers`. Damage followed by intact records is not a torn end, and is an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import io
import math
import os
import struct
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.errors import RunDirectoryError
from paceline.records.events import AppendFile, detach
from paceline.records.reader import LedgerFacts
from paceline.records.run_directory import file_operation, refuse_special_file, write_bytes

_MAGIC = b"PLED"
_HEADER = struct.Struct("<4sIIQII")
_WIDTHS = (0, 4, 8)
_POSITION = struct.Struct("<Q8s")
_CHECKSUM = struct.Struct("<I")
_BUFFER_BYTES = 1 << 18
_BLOCK_BYTES = 1 << 16
# Micro-batches encoded together: between two steps, code that ran long ago costs ten times as much as code that just
# ran, since the network has taken its place in the processor's caches.
_QUEUE = 16
_DIGEST_BYTES = 8
_NARROW, _WIDE = np.dtype("<u4"), np.dtype("<u8")

Ids = NDArray[np.int64]
Order = Callable[[int, int, int], Ids]
"""Returns the samples at positions of an epoch's order: epoch, first position, last position (excluded)."""
_NO_IDS: Ids = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class LedgerEntry:
    """One record of samples by their ids.

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

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.ids.size + self.broken.size


@dataclass(frozen=True)
class PositionEntry:
    """One record of samples that are consecutive in their epoch's order.

    Attributes:
        step: As in :class:`LedgerEntry`.
        epoch: As in :class:`LedgerEntry`.
        first: Position of the first sample in the epoch's order, from 0.
        samples: Number of samples.
        digest: :func:`digest_of` the ids that were used.
    """

    step: int
    epoch: int
    first: int
    samples: int
    digest: bytes


Entry = LedgerEntry | PositionEntry


def digest_of(ids: Ids) -> bytes:
    """Return the BLAKE2b digest, 8 bytes, of sample ids as 64-bit little-endian integers."""
    return hashlib.blake2b(ids.astype("<i8").tobytes(), digest_size=_DIGEST_BYTES).digest()


class LedgerWriter(AppendFile):
    """Appends to one rank's ledger file; call :func:`truncate_ledgers` first when resuming."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, buffering=_BUFFER_BYTES)
        self._queue: list[tuple[int, int, ArrayLike, Sequence[int] | Ids, int | None]] = []
        # Micro-batches of one step at consecutive positions: their record with the digest to come, and its state.
        self._pending: PositionEntry | None = None
        self._hash = hashlib.blake2b(digest_size=_DIGEST_BYTES)

    def append(
        self, *, step: int, epoch: int, ids: ArrayLike, broken: Sequence[int] | Ids = (), first: int | None = None
    ) -> None:
        """Record the samples of a micro-batch or a step, if there are any; steps must not decrease.

        A few records are kept before they are encoded: the arguments must not change.

        Args:
            step: As in :class:`LedgerEntry`.
            epoch: As in :class:`LedgerEntry`.
            ids: As in :class:`LedgerEntry`.
            broken: As in :class:`LedgerEntry`.
            first: Position of the first sample, if the ids are those of the epoch's order from there.
        """
        self._queue.append((step, epoch, ids, broken, first))
        if len(self._queue) == _QUEUE:
            self._encode_queue()

    def _encode_queue(self) -> None:
        queue, self._queue = self._queue, []
        for each in queue:
            self._encode_one(*each)

    def _encode_one(
        self, step: int, epoch: int, ids: ArrayLike, broken: Sequence[int] | Ids, first: int | None
    ) -> None:
        used = np.asarray(ids, dtype=np.int64)
        broken_ids = np.asarray(broken, dtype=np.int64) if len(broken) else _NO_IDS
        if first is None or broken_ids.size:
            self._write_pending()
            if used.size + broken_ids.size:
                self.write(_encode(step, epoch, used, broken_ids))
        elif used.size:
            before = self._pending
            if before is None or (before.step, before.epoch, before.first + before.samples) != (step, epoch, first):
                self._write_pending()
                before = PositionEntry(step, epoch, first, 0, b"")
            self._pending = replace(before, samples=before.samples + used.size)
            self._hash.update(used.astype("<i8").tobytes())

    def _write_pending(self) -> None:
        if (entry := self._pending) is not None:
            self._pending = None
            header = _HEADER.pack(_MAGIC, 0, entry.epoch, entry.step, entry.samples, 0)
            self.write(_framed(header + _POSITION.pack(entry.first, self._hash.digest())))
            self._hash = hashlib.blake2b(digest_size=_DIGEST_BYTES)

    def flush(self, *, durable: bool = False) -> None:
        """Pass all data to the operating system; with ``durable``, wait until it is on the disk."""
        self._encode_queue()
        self._write_pending()
        super().flush(durable=durable)


def ledger_path(directory: Path, rank: int) -> Path:
    """Return the file of one rank."""
    return directory / f"rank-{rank:05d}.ids"


def ledger_files(directory: Path) -> list[Path]:
    """Return the files of all ranks that ever took part, in order of rank.

    Raises:
        RunDirectoryError: If the folder cannot be read.
    """
    with file_operation("read", directory, noun="folder"), contextlib.suppress(FileNotFoundError):
        # Not Path.glob: it takes a folder that must not be read for an empty one.
        return [directory / name for name in sorted(os.listdir(directory)) if fnmatch(name, "rank-*.ids")]
    return []


def read_ledger(path: Path) -> Iterator[Entry]:
    """Yield the records of one rank in order; a torn end is left out.

    Raises:
        RunDirectoryError: If the file cannot be read, or is damaged before its end.
    """
    for _, entry in _records(path):
        yield entry


def truncate_ledgers(directory: Path, step: int, *, exclude: Collection[Path] = ()) -> int:
    """Cut records after ``step``, and torn ends, from every rank's file; return how many samples are left.

    A file is also cut where its steps decrease: there it was appended to itself, or to another. Call it in one process,
    before any rank opens its file.

    Args:
        directory: The run's ``ledger`` folder.
        step: The last step to keep.
        exclude: Files to leave alone.

    Raises:
        RunDirectoryError: If a file is damaged before its end, and none is changed; or if the disk fails.
    """
    samples, ends = 0, dict[Path, int]()
    for path in set(ledger_files(directory)).difference(exclude):
        ends[path] = last = 0
        for end, entry in _records(path):
            if not last <= entry.step <= step:
                break
            ends[path], last = end, entry.step
            samples += entry.samples
    for path, end in ends.items():
        with file_operation("truncate", path):
            detach(path)
            if end < path.stat().st_size:
                with path.open("r+b") as file:
                    file.truncate(end)
                    os.fsync(file.fileno())
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
    return _framed(header + all_ids.astype(dtype).tobytes())


def _framed(body: bytes) -> bytes:
    return body + _CHECKSUM.pack(zlib.crc32(body))


def _records(path: Path) -> Iterator[tuple[int, Entry]]:
    """Yield each record with the offset of its end, up to the end of the file or its torn end.

    The file is not open meanwhile: a run may have had more ranks than a process may open files.
    """
    refuse_special_file(path)
    content, begin = b"", 0  # what was read and not decoded yet, and its place in the file
    while True:
        with file_operation("read", path), path.open("rb", buffering=0) as file:
            file.seek(begin + len(content))
            # A record may be longer than a block.
            block = file.read(max(_BLOCK_BYTES, len(content)))
        if not block:
            break
        content += block
        offset = 0
        while record := _decode(content, offset):
            offset, entry = record
            yield begin + offset, entry
        content, begin = content[offset:], begin + offset
    if _has_record_after(content):
        raise RunDirectoryError(
            f"The ledger '{path}' is damaged at byte {begin}: a checksum does not match, and intact records "
            "follow. The samples used can no longer be proved: restore the file from a "
            "copy, or start the run in another directory."
        )
    if not _may_begin(content):
        raise RunDirectoryError(
            f"The ledger '{path}' is damaged at byte {begin}, or was written by another version of Paceline; nothing "
            "was changed. Use the version that wrote it, or restore the file from a copy."
        )


def _decode(data: bytes, offset: int) -> tuple[int, Entry] | None:
    """Return the record at an offset with the offset of its end, or None if there is no complete one."""
    body = offset + _HEADER.size
    if body > len(data):
        return None
    magic, width, epoch, step, used, broken = _HEADER.unpack_from(data, offset)
    checksum = body + (width * (used + broken) or _POSITION.size)
    if magic != _MAGIC or width not in _WIDTHS or checksum + _CHECKSUM.size > len(data):
        return None
    if zlib.crc32(data[offset:checksum]) != _CHECKSUM.unpack_from(data, checksum)[0]:
        return None
    end = checksum + _CHECKSUM.size
    if width == 0:
        first, digest = _POSITION.unpack_from(data, body)
        return end, PositionEntry(step, epoch, first, used, digest)
    dtype = _NARROW if width == _NARROW.itemsize else _WIDE
    all_ids = np.frombuffer(data[body:checksum], dtype=dtype).astype(np.int64)
    return end, LedgerEntry(step, epoch, all_ids[:used], all_ids[used:])


def _may_begin(data: bytes) -> bool:
    """Whether data may be the beginning of a torn record, or the zeros that a power cut leaves."""
    begin = data[:8].rstrip(b"\0")
    return any((_MAGIC + struct.pack("<I", width)).startswith(begin) for width in _WIDTHS)


def _has_record_after(data: bytes) -> bool:
    """Whether a complete record begins anywhere after the first byte."""
    position = data.find(_MAGIC, 1)
    while position >= 0 and _decode(data, position) is None:
        position = data.find(_MAGIC, position + 1)
    return position >= 0


_CHUNK = 1 << 20  # ids or positions handled at a time


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
        last: The last of several epochs without any record, which are counted as one; otherwise the epoch itself.
    """

    epoch: int
    used: int
    broken: int
    duplicates: int
    missing: int
    is_over: bool
    last: int

    @property
    def name(self) -> str:
        """The epoch, or the first and the last of several, counted from 1."""
        return f"{self.epoch + 1}" if self.epoch == self.last else f"{self.epoch + 1} to {self.last + 1}"

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
    order: Order | None = None,
    is_drawn: bool = False,
) -> LedgerSummary:
    """Count every sample of every epoch.

    Recorded positions are counted as such: which are missing, and which are there twice. Only where ids are recorded
    too are the ids at those positions looked up. Memory depends on the number of recorded ids, not on that of samples.

    Args:
        directory: The run's ``ledger`` folder.
        samples_per_epoch: Number of training samples; their ids are 0 to one less.
        epochs_over: Epochs whose every step was taken, if known. Without it, the last epoch found counts as unfinished
            if samples are missing from it.
        order: The run's order; needed if samples are drawn, or are not all recorded in the same way.
        is_drawn: Whether the order determines how often each sample is used; otherwise once.

    Raises:
        RunDirectoryError: If a file is damaged, or contains samples that the training set does not have.
    """
    stream = LedgerStream(directory)
    epochs: list[EpochCount] = []
    while stream.head is not None or (epochs[-1].last + 1 if epochs else 0) < epochs_over:
        epoch = epochs[-1].last + 1 if epochs else 0
        # Epochs without a record are counted, not looped over: there may be as many as a damaged file claims.
        following = epochs_over if stream.head is None else stream.head.epoch
        if following > epoch:
            missing = (following - epoch) * samples_per_epoch
            counts = {"used": 0, "broken": 0, "duplicates": 0, "missing": missing}
            epochs.append(EpochCount(epoch=epoch, last=following - 1, is_over=True, **counts))
            continue
        spans, ids, broken = _collected(stream, epoch, samples_per_epoch)
        depths = _depths(spans, samples_per_epoch)
        uncovered = sum(end - begin for begin, end, depth in depths if depth == 0)
        if repeated := [(begin, end) for begin, end, depth in depths for _ in range(depth - 1)]:
            assert order is not None
            ids = np.concatenate([ids, *(order(epoch, *span) for span in repeated)])
        if not ids.size or (not spans and not is_drawn):
            matched = np.unique(ids).size
        else:
            assert order is not None
            matched = _matched(ids, [(begin, end) for begin, end, depth in depths if depth == 0], partial(order, epoch))
        missing = uncovered - matched
        epochs.append(
            EpochCount(
                epoch=epoch,
                last=epoch,
                used=samples_per_epoch - uncovered + ids.size - broken,
                broken=broken,
                duplicates=ids.size - matched,
                missing=missing,
                is_over=epoch < epochs_over or stream.head is not None or missing == 0,
            )
        )
    return LedgerSummary(samples_per_epoch=samples_per_epoch, epochs=tuple(epochs))


class LedgerStream:
    """The records of all ranks in order of step.

    Attributes:
        directory: The run's ``ledger`` folder.
        head: The next record; None after the last.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        ranks = map(_ascending, ledger_files(directory))
        self._entries = heapq.merge(*ranks, key=lambda entry: (entry.epoch, entry.step))
        self.head: Entry | None = next(self._entries, None)

    def take(self, *, step: float = math.inf, epoch: float = math.inf) -> Iterator[Entry]:
        """Yield the records up to a step, or up to an epoch, which are included."""
        while self.head is not None and self.head.step <= step and self.head.epoch <= epoch:
            yield self.head
            self.head = next(self._entries, None)


def _ascending(path: Path) -> Iterator[Entry]:
    epoch = 0
    for entry in read_ledger(path):
        if entry.epoch < epoch:
            raise RunDirectoryError(
                f"The ledger '{path}' returns to epoch {entry.epoch} at step {entry.step}, "
                f"after epoch {epoch}: two runs have written to it. Start the run in another directory."
            )
        epoch = entry.epoch
        yield entry


def _collected(stream: LedgerStream, epoch: int, samples: int) -> tuple[list[tuple[int, int]], NDArray[Any], int]:
    """Return an epoch's recorded positions (begin, end), its recorded ids, and how many of these are broken."""
    spans: list[tuple[int, int]] = []
    listed: list[NDArray[Any]] = []
    chunk: list[Ids] = [_NO_IDS]
    size = broken = 0
    for entry in stream.take(epoch=epoch):
        if isinstance(entry, PositionEntry):
            end = entry.first + entry.samples
            _check_sample(stream, end - 1, samples)
            # Ranks take consecutive parts of a step, so a whole epoch is usually one span.
            spans.append((spans.pop()[0] if spans and spans[-1][1] == entry.first else entry.first, end))
            continue
        broken += entry.broken.size
        chunk += (entry.ids, entry.broken)
        size += entry.samples
        if size >= _CHUNK:
            listed.append(_narrowed(stream, chunk, samples))
            chunk, size = [_NO_IDS], 0
    return spans, np.concatenate([*listed, _narrowed(stream, chunk, samples)]), broken


def _narrowed(stream: LedgerStream, chunk: list[Ids], samples: int) -> NDArray[Any]:
    ids = np.concatenate(chunk)
    _check_sample(stream, int(ids.max(initial=0)), samples)
    return ids.astype(np.min_scalar_type(samples))


def _check_sample(stream: LedgerStream, sample: int, samples: int) -> None:
    if sample >= samples:
        raise RunDirectoryError(
            f"The ledger '{stream.directory}' holds sample {sample}, but the training set has {samples} "
            "samples: this run was trained on other data. Name the data set it was trained on."
        )


def _depths(spans: list[tuple[int, int]], samples: int) -> list[tuple[int, int, int]]:
    """Return pieces (begin, end, depth) of ``range(samples)``, and how many spans cover each."""
    edges = np.array([0, samples, *(begin for begin, _ in spans), *(end for _, end in spans)])
    by_edge = np.argsort(edges, kind="stable")
    depths = np.repeat([0, 1, -1], [2, len(spans), len(spans)])[by_edge].cumsum()[:-1]
    begins, ends = edges[by_edge][:-1], edges[by_edge][1:]
    pieces = np.stack([begins, ends, depths], axis=1)[begins < ends]
    return [(begin, end, depth) for begin, end, depth in pieces.tolist()]


def _matched(ids: NDArray[Any], gaps: list[tuple[int, int]], order: Callable[[int, int], Ids]) -> int:
    """Return how many of the ids belong at the positions in gaps, each as often as it occurs there."""
    distinct, times = np.unique(ids, return_counts=True)
    wanted = np.zeros(len(distinct), dtype=np.int64)
    for begin, end in gaps:
        for at in range(begin, end, _CHUNK):
            if (wanted >= times).all():  # the rest of an unfinished epoch may be long, and nothing is left to match
                return len(ids)
            some = order(at, min(at + _CHUNK, end))
            places = np.minimum(np.searchsorted(distinct, some), len(distinct) - 1)
            np.add.at(wanted, places[distinct[places] == some], 1)
    return int(np.minimum(wanted, times).sum())


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
