"""Daemon threads for requests to a store.

The threads of :mod:`concurrent.futures` are joined when the interpreter ends, so that a store which does not answer
would keep a finished run alive. These are not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def run_at_once(call: Callable[[T], object], items: Collection[T], *, threads: int, name: str) -> None:
    """Call something for each item, in several threads.

    After the first error no more calls are started, and it is raised when those under way have ended; an interrupt is
    raised at once.

    Args:
        call: Takes an item; its result is dropped.
        items: Each is taken once.
        threads: Most threads at a time.
        name: Name of the threads.
    """
    waiting, errors = list(reversed(list(items))), list[BaseException]()

    def work() -> None:
        while not errors:
            try:
                item = waiting.pop()
            except IndexError:
                return
            try:
                call(item)
            except BaseException as error:  # noqa: BLE001  # whatever it is, the caller is to have it
                errors.append(error)

    begun = [threading.Thread(target=work, name=name, daemon=True) for _ in range(min(threads, len(waiting)))]
    for each in begun:
        each.start()
    try:
        for each in begun:
            each.join()
    except BaseException as error:
        errors.append(error)
        raise
    if errors:
        raise errors[0]


def begin(call: Callable[[], T], *, name: str) -> Future[T]:
    """Call something in a thread; the future has its result or its error.

    Args:
        call: Runs in the thread.
        name: Name of the thread.
    """
    future = Future[T]()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  # whatever it is, the caller is to have it
            future.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future
