"""Durable files: neither a kill nor a power cut leaves a partial file.

Every byte of a checkpoint goes through this file: new files only, flushed to the device before anything relies on them,
with a BLAKE3 digest of the intended bytes, not of those that arrived.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from io import BufferedReader
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from blake3 import blake3

from paceline.errors import CheckpointError

_ADVICE = {
    errno.ENOSPC: "Free some space, or keep fewer checkpoints.",
    errno.EDQUOT: "Free some of the quota, or keep fewer checkpoints.",
    errno.EACCES: "Give this user permission for it, or choose another directory.",
    errno.EPERM: "Give this user permission for it, or choose another directory.",
    errno.EISDIR: "Give a regular file.",
    errno.EROFS: "Choose a run directory on a writable file system.",
}

# A file is missing, or of the wrong kind. Any other error comes from the disk and does not depend on the file's
# content.
_CONTENT_ERRORS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, None)
_PAUSES_SECONDS = (0.1, 0.4, 1.5)

# Maximum bytes written between two flushes: a save makes visible progress, however slow the disk, and the pages that it
# fills do not crowd out the data's.
_FLUSH_BYTES = 64 * 2**20
# Maximum bytes per call: larger ones took twice as much processor time (docs/decisions/0005, benchmarks/checkpoint.py).
PIECE_BYTES = 2**20

_DIGEST = re.compile(r"[0-9a-f]{64}")

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class FileFacts:
    """Size and digest of one file.

    Attributes:
        size_bytes: Its size.
        digest: BLAKE3 digest of its content, in lower-case hexadecimal.
    """

    size_bytes: int
    digest: str

    @classmethod
    def of(cls, content: bytes | bytearray) -> FileFacts:
        """Describe a file with this content."""
        return cls(len(content), blake3(content).hexdigest())

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> FileFacts:
        """Read :meth:`to_json`'s result.

        Raises:
            ValueError: Naming the entry that is not valid.
        """
        size, digest = value.get("size_bytes"), value.get("blake3")
        if type(size) is not int or size < 0:
            raise ValueError(f"its entry 'size_bytes' is {size!r}, expected a whole number of 0 or more")
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise ValueError(f"its entry 'blake3' is {digest!r}, expected 64 hexadecimal digits")
        return cls(size, digest)

    def to_json(self) -> dict[str, Any]:
        """Return size and digest, the latter under the name of its algorithm."""
        return {"size_bytes": self.size_bytes, "blake3": self.digest}


def is_disk_failure(error: OSError) -> bool:
    """Whether the disk or the system failed to read, regardless of the file's content."""
    return error.errno not in _CONTENT_ERRORS


def with_retries(read: Callable[P, T]) -> Callable[P, T]:
    """Make a reader retry, after short pauses, when the disk fails."""

    @wraps(read)
    def retry_read(*args: P.args, **kwargs: P.kwargs) -> T:
        for pause in _PAUSES_SECONDS:
            try:
                return read(*args, **kwargs)
            except OSError as error:
                if not is_disk_failure(error):
                    raise
                time.sleep(pause)
        return read(*args, **kwargs)

    return retry_read


@contextmanager
def reporting_disk_errors(action: str, path: Path) -> Iterator[None]:
    """Turn an :class:`OSError` into one message: what failed, where, why, and what to change.

    Raises:
        CheckpointError: With the original error as its cause.
    """
    try:
        yield
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, "unknown error")
        advice = _ADVICE.get(error.errno or 0, "Check the disk, then try again.")
        where = f"{path} ({error.filename})" if error.filename not in (None, str(path), path) else str(path)
        reason = error.strerror or str(error)
        raise CheckpointError(f"Cannot {action} {where}: {reason} ({code}). {advice}", path=path) from error


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileFacts:
    """Write a new file and wait until it is on the device.

    Raises:
        OSError: If the file exists, or the disk fails.
    """
    digest = blake3()
    size = flushed = 0
    with open(path, "xb") as file:
        for chunk in chunks:
            for start in range(0, len(chunk), PIECE_BYTES):
                piece = chunk[start : start + PIECE_BYTES]
                digest.update(piece)
                file.write(piece)
                size += len(piece)
                if size - flushed >= _FLUSH_BYTES:
                    file.flush()
                    os.fsync(file.fileno())
                    flushed = size
        file.flush()
        os.fsync(file.fileno())
    return FileFacts(size, digest.hexdigest())


@with_retries
def hash_file(path: Path, algorithm: Callable[..., Any] = blake3) -> FileFacts:
    """Read a file in pieces and return its facts; memory use does not depend on its size."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, algorithm)
        return FileFacts(file.tell(), digest.hexdigest())


def size_of(directory: Path) -> int:
    """Return the size of a directory's files, which may change meanwhile."""
    size = 0
    for folder, _, files in os.walk(directory):  # skips a folder that has just been removed
        for name in files:
            with suppress(OSError):
                size += os.stat(os.path.join(folder, name)).st_size
    return size


def open_regular_file(path: Path) -> BufferedReader:
    """Open a file for reading; a pipe or a device, which might never end, is refused with an :class:`OSError`."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EISDIR, "it is not a regular file", str(path))
    return open(path, "rb")


@with_retries
def read_regular_file(path: Path) -> bytearray:
    """Read a complete file, if it is a regular one."""
    with open_regular_file(path) as file:
        content = bytearray(os.fstat(file.fileno()).st_size)
        del content[file.readinto(content) :]  # the file may have become shorter
        return content
