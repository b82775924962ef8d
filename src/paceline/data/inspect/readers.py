"""Distribute work over all cores, where a piece of it may end the process that does it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Note = Callable[[int], None]
Work = Callable[[range, Note], T]

_ITEMS = 32  # per piece: fetched often enough for progress to be seen, seldom enough to cost nothing
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FORK = multiprocessing.get_context("fork")  # what is shared need not be picklable, and is not copied


@dataclass(frozen=True)
class Done(Generic[T]):
    """A piece of work, and its result."""

    piece: range
    result: T


@dataclass(frozen=True)
class Died:
    """An item whose process ended while it was worked on, with the process's exit code."""

    item: int
    exit_code: int


class _Reader(Generic[T]):
    """A process that does one piece after the other."""

    def __init__(self, work: Work[T]) -> None:
        self.piece = range(0)
        self.connection, theirs = _FORK.Pipe()
        self._at = _FORK.RawValue("q", -1)
        self._process = _FORK.Process(target=_serve, args=(work, theirs, self._at), daemon=True)
        self._process.start()
        theirs.close()

    def give(self, piece: range) -> None:
        """Have a piece done."""
        self.piece = piece
        self._at.value = piece.start
        # A process that has died says so where its result is awaited.
        with contextlib.suppress(BrokenPipeError):
            self.connection.send(piece)

    def take(self) -> Done[T] | Died:
        """The result of the piece, which is there."""
        try:
            failed, result = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            return Died(int(self._at.value), self._process.exitcode or 0)
        if failed:
            raise RuntimeError(f"a process that reads images failed:\n{result}")
        return Done(self.piece, result)

    def end(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.join()
        self.connection.close()


def _serve(work: Work[Any], connection: Connection, at: Any) -> None:
    """Do pieces until the process is ended."""
    # A terminal sends its interrupt to all; the first process ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    warnings.simplefilter("ignore")
    threading.Thread(target=_end_with_the_first, daemon=True).start()

    def note(item: int) -> None:
        at.value = item

    while True:
        piece = connection.recv()
        try:
            answer = (False, work(piece, note))
        except Exception:  # noqa: BLE001 (raised again where it can be told)
            answer = (True, traceback.format_exc())
        connection.send(answer)


def _end_with_the_first() -> None:
    """Leave when the first process is gone, also if it was killed, and in the middle of a read that never returns."""
    first = multiprocessing.parent_process()
    assert first is not None
    wait([first.sentinel])
    os._exit(1)


def in_parallel(work: Work[T], items: int, *, workers: int) -> Iterator[Done[T] | Died]:
    """Do ``work`` on items 0 … ``items`` - 1 in several processes, and yield results as they come.

    An item during which a process ends is yielded as :class:`Died`; everything else is done by another process.

    Args:
        work: Does a range of items; calls its second argument with each item before it begins with it.
        items: How many there are.
        workers: Processes.
    """
    waiting = deque(range(begin, min(begin + _ITEMS, items)) for begin in range(0, items, _ITEMS))
    readers: dict[Connection, _Reader[T]] = {}
    try:
        for _ in range(min(workers, len(waiting))):
            _begin(work, readers, waiting.popleft())
        while readers:
            for connection in wait(list(readers)):
                assert isinstance(connection, Connection)
                yield from _collect(work, readers, connection, waiting)
    finally:
        for reader in readers.values():
            reader.end()


def _begin(work: Work[T], readers: dict[Connection, _Reader[T]], piece: range) -> None:
    # Held back, or an interrupt could be lost: what is raised in Python's own code around a fork is not passed on.
    held = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        reader = _Reader(work)
        readers[reader.connection] = reader
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
    reader.give(piece)


def _collect(
    work: Work[T], readers: dict[Connection, _Reader[T]], connection: Connection, waiting: deque[range]
) -> Iterator[Done[T] | Died]:
    """Take what a process has done, and have it, or another in its place, go on."""
    reader = readers[connection]
    result = reader.take()
    if isinstance(result, Died):
        piece = reader.piece
        before, after = range(piece.start, result.item), range(result.item + 1, piece.stop)
        waiting.extendleft(part for part in (after, before) if part)
    if waiting and isinstance(result, Done):
        reader.give(waiting.popleft())
    else:
        del readers[connection]
        reader.end()
        if waiting:
            _begin(work, readers, waiting.popleft())
    yield result
