"""Disk cache: files are written atomically and validated when read."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.host.machine import cache_folder
from paceline.parsing.files import TOO_FRESH_NS, remember
from paceline.parsing.plain_text import load_json

Arrays = dict[str, NDArray[Any]]
Stamp = tuple[int, int, int, int]
"""A file's size in bytes, inode, and modification and change times in ns."""


def stamp_of(path: str | Path) -> Stamp:
    """Return a stamp that changes when a file is written or replaced; raises OSError."""
    status = os.stat(path)
    return status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def stamp_or_none(path: str | Path) -> Stamp | None:
    """Return the same as :func:`stamp_of`, or None if the file is missing."""
    try:
        return stamp_of(path)
    except OSError:
        return None


def cached(
    kind: str,
    key: object,
    stamps: Sequence[Stamp | None],
    find: Callable[[], Any],
    *,
    now: int,
    is_kept: Callable[[Any], bool] = lambda _: True,
) -> Any:
    """Return the JSON result of ``find``, cached as long as the files that it reads have the same stamps.

    Args:
        kind: Folder in the cache.
        key: Identifies the result and its files.
        stamps: Stamps of the files; None for a missing one.
        find: Computes the result.
        now: A time before the stamps were taken, in ns.
        is_kept: Whether the result is worth caching.
    """
    path = cache_folder() / kind / f"{_digest(key)}.json"
    state = _digest(stamps)
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        stored = load_json(path.read_bytes())
        if stored["state"] == state:
            return stored["found"]
    result = find()
    is_settled = all(each is not None and max(each[2:]) < now - TOO_FRESH_NS for each in stamps)
    if is_settled and is_kept(result):
        remember(path, json.dumps({"state": state, "found": result}).encode())
    return result


def _digest(facts: object) -> str:
    return hashlib.sha256(repr(facts).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def remember_arrays(path: Path, arrays: Arrays) -> bool:
    """Write arrays atomically, like :func:`paceline.parsing.files.remember`."""
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]  # its own option is a bool, and no array is named so
    return remember(path, content.getvalue())


def recall_arrays(path: Path) -> Arrays | None:
    """Read arrays back; None if they are missing or damaged. The caller must check their content."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError, KeyError, EOFError, TypeError, AttributeError, zipfile.BadZipFile, MemoryError):
        return None
