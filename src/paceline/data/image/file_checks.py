"""Check image files before a run: find unreadable ones from each file's header and end.

All files of a set of up to ``MAX_TRIED`` images are checked; of a larger set that many, evenly spread, so that the
start is not delayed. A file that seems truncated is decoded to be sure. Damage inside a file is only found when it is
read. Slow results are cached while all files keep their size, times and inode.
"""

from __future__ import annotations

import errno
import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from paceline.data.disk_cache import cached, stamp_or_none
from paceline.data.image.decode import HEIF_ENDINGS, BrokenImageError, check_head, decode, guess_format, head_of
from paceline.data.image.pillow_pixels import LARGEST_PIXELS
from paceline.data.image.source import FileSource, Ids
from paceline.errors import DataError

MAX_TRIED = 20_000
MIN_CACHED_SECONDS = 0.2  # quicker checks are repeated
_VERSION = 3  # limit of the cached result
_UNREADABLE = "it cannot be read"  # perhaps a temporary failure
# Of the file or the link to it; any other error is the disk's.
_WRONG_NAMES = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.ELOOP)

_READERS = 8  # each thread mostly waits for the disk
_AT_ONCE = 64
_HEAD_BYTES, _END_BYTES = 2**16, 64


def spread(count: int, limit: int | None) -> Ids:
    """Return at most ``limit`` of ``count`` indices, evenly spread."""
    if limit is None or limit >= count:
        return np.arange(count, dtype=np.int64)
    return (np.arange(limit, dtype=np.int64) * count + count // 2) // limit


def broken_files(source: FileSource) -> dict[int, str]:
    """Return the samples with unreadable files, each with the reason.

    Raises:
        DataError: If the disk or its server fails during the check.
    """
    samples = spread(len(source), MAX_TRIED)
    paths = source.files(samples)
    begin, now = time.perf_counter(), time.time_ns()

    def find() -> list[tuple[int, str]]:
        pieces = (paths[first : first + _AT_ONCE] for first in range(0, len(paths), _AT_ONCE))
        try:
            tried = itertools.chain.from_iterable(pool.map(lambda piece: list(map(head_fault, piece)), pieces))
            return [(index, reason) for index, reason in enumerate(tried) if reason]
        except OSError as error:
            raise DataError(
                f"{error.filename or 'an image'!r} could not be read: {error.strerror}. The disk or its server "
                "failed, not the file: run the same command again when it is back."
            ) from error

    def is_kept(faults: list[tuple[int, str]]) -> bool:
        took_long = time.perf_counter() - begin >= MIN_CACHED_SECONDS
        return took_long and not any(reason.startswith(_UNREADABLE) for _, reason in faults)

    with ThreadPoolExecutor(_READERS) as pool:
        stamps = list(pool.map(stamp_or_none, paths))
        faults = cached("heads", (_VERSION, HEIF_ENDINGS, paths), stamps, find, now=now, is_kept=is_kept)
    return {int(samples[index]): reason for index, reason in faults}


def head_fault(path: str) -> str:
    """Explain why an image file is unreadable, judging by its header and its end; empty if it seems intact.

    Raises:
        OSError: If the disk or its server fails, which does not mean that the file is broken.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - _END_BYTES, 0))
            end = file.read()
        if not head:
            return "an empty file"
        if is_truncated(head, end, size):
            decode(path, 3)
        elif (header_size := head_of(head)) is None or header_size[0] * header_size[1] > LARGEST_PIXELS:
            check_head(path)
    except OSError as error:
        if error.errno not in _WRONG_NAMES:
            raise
        return f"{_UNREADABLE}: {error.strerror}"
    except BrokenImageError as error:
        return guess_format(head) or error.reason
    return ""


def is_truncated(head: bytes, end: bytes, size: int) -> bool:
    """Whether a file may be truncated, judging by its first and last bytes and its size."""
    if head.startswith(b"\xff\xd8"):
        return not end.endswith(b"\xff\xd9")
    if head.startswith(b"\x89PNG"):
        return b"IEND" not in end
    return head.startswith(b"RIFF") and size < 8 + int.from_bytes(head[4:8], "little")
