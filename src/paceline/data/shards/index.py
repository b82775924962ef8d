"""How many samples each shard has: counted once by several threads, and kept in the user's cache.

Each count is written as soon as it is known, so an interrupted index continues.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from paceline.data.shards.formats import ShardFiles, open_shard
from paceline.errors import DataError
from paceline.host.machine import cache_folder
from paceline.parsing.plain_text import load_json

_THREADS = 8


def count_samples(place: ShardFiles, names: list[str], on_damaged: Callable[[DataError], None]) -> NDArray[np.int64]:
    """Return the number of samples in each shard, int64 [shards]; 0 for those that ``on_damaged`` accepts."""
    # By folder, not by file: a file more leaves the other counts known.
    joined = "\0".join([repr(place), *sorted({name.rpartition("/")[0] for name in names})])
    memory = (
        cache_folder()
        / "indexes"
        / f"shards-{hashlib.sha256(joined.encode('utf-8', 'surrogateescape')).hexdigest()[:32]}.jsonl"
    )
    known: dict[str, tuple[int, list[object]]] = {}
    with contextlib.ExitStack() as closed:
        notes = None
        with contextlib.suppress(OSError):  # a cache that cannot be used only costs time
            memory.parent.mkdir(parents=True, exist_ok=True)
            notes = closed.enter_context(memory.open("a+", encoding="utf-8", errors="replace"))
            notes.seek(0)
            for line in notes:
                with contextlib.suppress(ValueError, TypeError):  # a line that a kill has cut
                    name, count, stamp = load_json(line)
                    known[name] = count, stamp

        def count_one(name: str) -> int | DataError:
            try:
                stamp = [*place.stamp(name)]
                if (before := known.get(name)) is not None and before[1] == stamp:
                    return before[0]
                found = len(open_shard(place, name))
            except DataError as error:
                return error
            if notes is not None:
                with contextlib.suppress(OSError):
                    notes.write(f"\n{json.dumps([name, found, stamp])}\n")
                    notes.flush()
            return found

        with ThreadPoolExecutor(_THREADS) as threads:
            counts = list(threads.map(count_one, names))
    for found in counts:
        if isinstance(found, DataError):
            on_damaged(found)
    return np.array([0 if isinstance(each, DataError) else each for each in counts], dtype=np.int64)
