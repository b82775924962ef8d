"""Which samples did each rank really train on, and was each of them used exactly once per epoch?

Every rank appends to a file of its own, ``ledger/rank-00000.ids``. The file is a row of records; one record
holds the samples of one micro-batch or one step, little-endian::

    magic "PLED" | bytes per id: u8 | 3 zero bytes | epoch: u32 | step: u64 | ids: u32 | broken ids: u32
    | the ids | the broken ids | CRC-32 of all before it: u32

Appending costs microseconds and never waits for the disk; ``flush(durable=True)`` does, before a checkpoint
becomes visible. A kill can tear the last record: it is ignored when reading and cut off by
:func:`truncate_ledgers`. Damage that is followed by whole records is no torn end, and is an error.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.errors import RunDirectoryError
from paceline.records.append_file import AppendFile, detach
from paceline.records.run_directory import cannot, refuse_odd_record

_MAGIC = b"PLED"
_HEADER = struct.Struct("<4sB3xIQII")
_CHECKSUM = struct.Struct("<I")
_BUFFER_BYTES = 1 << 18
_NARROW, _WIDE = np.dtype("<u4"), np.dtype("<u8")

Ids = NDArray[np.int64]
_NONE: Ids = np.empty(0, dtype=np.int64)


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
        lost = np.asarray(broken, dtype=np.int64) if len(broken) else _NONE
        if used.size + lost.size:
            self.write(_encode(step, epoch, used, lost))


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
    """Cut from every rank's file what came after ``step``, and torn ends; return how many samples are left.

    Call it in one process, before any rank opens its file.

    Raises:
        RunDirectoryError: If a file is damaged before its end, or the disk refuses.
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
            raise cannot("truncate", path, error) from error
    return samples


def _encode(step: int, epoch: int, ids: Ids, broken: Ids) -> bytes:
    """Frame one record."""
    both = np.concatenate((ids, broken)) if broken.size else ids
    # Read as unsigned, what is negative is larger than any sample's id.
    largest = int(both.view(np.uint64).max())
    if largest >= 1 << 63:
        raise ValueError(f"sample ids are not negative, found {int(both.min())}")
    dtype = _NARROW if largest < 1 << 32 else _WIDE
    header = _HEADER.pack(_MAGIC, dtype.itemsize, epoch, step, ids.size, broken.size)
    body = header + both.astype(dtype).tobytes()
    return body + _CHECKSUM.pack(zlib.crc32(body))


def _records(path: Path) -> Iterator[tuple[int, LedgerEntry]]:
    """Yield each record with the offset of its end."""
    refuse_odd_record(path)
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                yield from _parse(data, path)
    except OSError as error:
        raise cannot("read", path, error) from error


def _parse(data: mmap.mmap, path: Path) -> Iterator[tuple[int, LedgerEntry]]:
    """Walk the records of a mapped file up to its end or its torn end."""
    offset = 0
    while offset < len(data):
        found = _decode(data, offset)
        if found is None:
            if _has_record_after(data, offset):
                raise RunDirectoryError(
                    f"The ledger '{path}' is damaged at byte {offset}: a checksum does not match, and whole "
                    "records follow. What was trained on can no longer be proved: restore the file from a "
                    "copy, or start the run in another directory."
                )
            return
        offset = found[0]
        yield found


def _decode(data: mmap.mmap, offset: int) -> tuple[int, LedgerEntry] | None:
    """Return the record at an offset with the offset of its end, or None if there is no whole one."""
    body = offset + _HEADER.size
    if body > len(data):
        return None
    magic, width, epoch, step, used, lost = _HEADER.unpack_from(data, offset)
    checksum = body + width * (used + lost)
    if magic != _MAGIC or width not in (4, 8) or checksum + _CHECKSUM.size > len(data):
        return None
    if zlib.crc32(data[offset:checksum]) != _CHECKSUM.unpack_from(data, checksum)[0]:
        return None
    dtype = _NARROW if width == _NARROW.itemsize else _WIDE
    both = np.frombuffer(data[body:checksum], dtype=dtype).astype(np.int64)
    return checksum + _CHECKSUM.size, LedgerEntry(step, epoch, both[:used], both[used:])


def _has_record_after(data: mmap.mmap, offset: int) -> bool:
    """True if a whole record begins anywhere after an offset."""
    at = data.find(_MAGIC, offset + 1)
    while at >= 0:
        if _decode(data, at) is not None:
            return True
        at = data.find(_MAGIC, at + 1)
    return False
