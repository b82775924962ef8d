"""How many samples each shard has: counted once by several threads, and kept in the user's cache.

Each count is appended to a file as soon as it is known, so an interrupted index continues.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.data.disk_cache import Stamp, stamp_of
from paceline.data.shards.formats import open_shard
from paceline.errors import DataError, data_error
from paceline.host.machine import cache_folder
from paceline.parsing.plain_text import load_json

_THREADS = 8
_Counted = tuple[int, Stamp]


def count_samples(paths: Sequence[Path], on_damaged: Callable[[DataError], None]) -> NDArray[np.int64]:
    """Return the number of samples in each shard, int64 [shards]; 0 for those that ``on_damaged`` accepts."""
    joined = "\0".join(map(os.path.realpath, paths)).encode("utf-8", "surrogateescape")
    memory = cache_folder() / "indexes" / f"shards-{hashlib.sha256(joined).hexdigest()[:32]}.jsonl"
    known = _recalled(memory)
    with contextlib.ExitStack() as closed:
        notes = None
        with contextlib.suppress(OSError):  # a cache that cannot be written only costs time
            memory.parent.mkdir(parents=True, exist_ok=True)
            notes = closed.enter_context(memory.open("a", encoding="utf-8"))

        def count(path: Path) -> int | DataError:
            try:
                stamp = stamp_of(path)
                if (before := known.get(os.fspath(path))) is not None and before[1] == stamp:
                    return before[0]
                found = len(open_shard(path))
            except OSError as error:
                return data_error(path, f"cannot be read ({error.strerror}): restore it.")
            except DataError as error:
                return error
            if notes is not None:
                with contextlib.suppress(OSError):
                    notes.write(f"{json.dumps([os.fspath(path), found, stamp])}\n")
                    notes.flush()
            return found

        with ThreadPoolExecutor(_THREADS) as threads:
            counts = list(threads.map(count, paths))
    for found in counts:
        if isinstance(found, DataError):
            on_damaged(found)
    return np.array([0 if isinstance(each, DataError) else each for each in counts], dtype=np.int64)


def _recalled(memory: Path) -> dict[str, _Counted]:
    known: dict[str, _Counted] = {}
    with contextlib.suppress(OSError):
        for line in memory.read_bytes().splitlines():
            with contextlib.suppress(ValueError, TypeError):  # a line that a kill has cut
                name, count, stamp = load_json(line)
                known[name] = count, tuple(stamp)
    return known
