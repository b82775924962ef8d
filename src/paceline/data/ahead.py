"""How are batches made before they are asked for, by threads, and still come in their order?"""

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
        yield from map(make, pieces)
        return
    coming, ahead = iter(pieces), threads * prefetch
    waiting: deque[Future[Made]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="reader") as pool:
        try:
            while True:
                waiting.extend(pool.submit(make, each) for each in itertools.islice(coming, 1 + ahead - len(waiting)))
                if not waiting:
                    return
                yield waiting.popleft().result()
        finally:
            for each in waiting:
                each.cancel()
