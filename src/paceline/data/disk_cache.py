"""Cache on disk: files written whole or not at all, and read back warily."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]
Stamp = tuple[int, int, int, int]
"""A file's size in bytes, inode, and times of writing and change in ns."""

# Times have steps, of two seconds on the coarsest file systems: what changed so lately may change again unseen.
TOO_FRESH_NS = 3_000_000_000


def stamp_of(path: str) -> Stamp:
    """Return what changes when a file is written or replaced; raises OSError."""
    found = os.stat(path)
    return found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def remember(path: Path, content: bytes) -> bool:
    """Write a file of the cache, whole or not at all; False where it cannot be written, or there is no room."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A name that no other process has, on this host or another one.
        descriptor, partial = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
    except OSError:
        return False
    return True


def remember_arrays(path: Path, arrays: Arrays) -> bool:
    """Write arrays as :func:`remember` writes bytes."""
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]  # its own option is a bool, and no array is named so
    return remember(path, content.getvalue())


def recall_arrays(path: Path) -> Arrays | None:
    """Read arrays back; None if there are none, or the file is torn. What they say is the caller's to check."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError, KeyError, EOFError, TypeError, AttributeError, zipfile.BadZipFile, MemoryError):
        return None
