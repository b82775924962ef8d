"""The processes that make shards: this one, or several that take the next shard in turn; none outlives it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from typing import Any

from paceline.data.image.sets.packed import Shard
from paceline.data.packing.shards import PackingError, Work, make_shard

Progress = Callable[[int, int], None]
"""Called now and then with (images done, images in all)."""

_CHECK_SECONDS = 0.2
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def make_shards(work: Work, shards: Sequence[Shard], workers: int, progress: Progress) -> None:
    """Make shards that are missing.

    Args:
        work: What they are made of.
        shards: Those to make.
        workers: Processes.
        progress: Told how many images are done, and how many there are.

    Raises:
        PackingError: If the disk refuses, or a process dies.
    """
    total = sum(shard.end - shard.begin for shard in shards)
    progress(0, total)
    if workers == 1 or len(shards) < 2:
        done = 0

        def note(count: int) -> None:
            nonlocal done
            done += count
            progress(done, total)

        for shard in shards:
            make_shard(work, shard, note)
        return
    _make_beside(work, shards, min(workers, len(shards)), progress)


def _make_beside(work: Work, shards: Sequence[Shard], workers: int, progress: Progress) -> None:
    # Spawned processes would import everything again and be handed the list of files; macOS cannot fork safely.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    shared = _Shared(context, len(shards))
    total = sum(shard.end - shard.begin for shard in shards)
    with ProcessPoolExecutor(workers, context, _settle_in, (work, shared, os.getpid())) as pool:
        try:
            with _forking():
                futures = [pool.submit(_make, slot, shard) for slot, shard in enumerate(shards)]
            pending: Any = futures
            while pending:
                finished, pending = wait(pending, _CHECK_SECONDS, FIRST_EXCEPTION)
                progress(sum(shared.done), total)
                for future in finished:
                    future.result()
        except BaseException as error:
            shared.closing.value = 1  # whoever is in the middle of a shard need not finish it
            pool.shutdown(wait=True, cancel_futures=True)
            if isinstance(error, BrokenProcessPool):
                raise PackingError(
                    "a process that made shards has died, perhaps for want of memory; run the same command again, with "
                    "fewer --workers: what is finished stays."
                ) from error
            raise


@contextmanager
def _forking() -> Iterator[None]:
    """Start processes so that no signal comes between: what its handler raises while Python forks would be lost."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Shared:
    """What the processes tell one another; without locks, which a process that is killed would keep."""

    def __init__(self, context: BaseContext, shards: int) -> None:
        self.done: Any = context.RawArray("q", shards)
        self.closing: Any = context.RawValue("b", 0)


_here: tuple[Work, _Shared] | None = None


def _settle_in(work: Work, shared: _Shared, parent: int) -> None:
    global _here  # noqa: PLW0603 (a process of the pool is given its work once)
    _here = (work, shared)
    for number in _SIGNALS:
        # The parent hears them, and says what to do.
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    threading.Thread(target=_leave_in_time, args=(shared, parent), daemon=True).start()


def _leave_in_time(shared: _Shared, parent: int) -> None:
    """Leave when nobody waits for the shards any more: the parent was killed, or gives up."""
    while os.getppid() == parent and not shared.closing.value:
        time.sleep(_CHECK_SECONDS)
    os._exit(1)


def _make(slot: int, shard: Shard) -> None:
    assert _here is not None
    work, shared = _here

    def note(count: int) -> None:
        shared.done[slot] += count

    make_shard(work, shard, note)
