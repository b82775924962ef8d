"""Batches that threads make ahead, in order."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from paceline.machine import available_cores
from paceline.world import World

Piece = TypeVar("Piece")
Made = TypeVar("Made")


_MOST_THREADS = 16


def reading_threads(workers: int | str, world: World) -> tuple[int, str]:
    """How many threads of each process read, with the reason, where ``data.workers`` counts threads.

    Args:
        workers: What the recipe says: a number, or ``auto``.
        world: The processes that share this machine's cores.
    """
    if isinstance(workers, int):
        return workers, "as the recipe says"
    cores = available_cores()
    threads = max(1, min(cores // world.local_world_size - 1, _MOST_THREADS))
    return threads, f"threads that read: {cores} cores for {world.local_world_size} process(es), one for training"


def made_ahead(
    make: Callable[[Piece], Made], pieces: Iterable[Piece], *, threads: int, prefetch: int = 1
) -> Iterator[Made]:
    """Yield ``make(piece)`` of each piece, in their order, and have the next ones made meanwhile.

    What ``make`` raises is raised where its piece's turn comes. ``pieces`` is consumed lazily, by the caller's thread.

    Args:
        make: What the threads call.
        pieces: What of.
        threads: How many make at once; 0 makes each when it is asked for.
        prefetch: How many pieces are begun ahead for each thread.
    """
    if not threads:
        for piece in pieces:  # map() would take a StopIteration out of ``make`` for the end
            yield make(piece)
        return
    coming, waiting = iter(pieces), deque[Future[Made]]()
    with ThreadPoolExecutor(threads, thread_name_prefix="reader") as pool:
        try:
            while True:
                missing = 1 + threads * prefetch - len(waiting)
                waiting.extend(pool.submit(make, each) for each in itertools.islice(coming, missing))
                if not waiting:
                    return
                yield waiting.popleft().result()
        finally:  # before the pool is closed, which waits for all that was not cancelled
            for each in waiting:
                each.cancel()
