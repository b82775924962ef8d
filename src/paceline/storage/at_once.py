"""How is something done for many files at once, without an interpreter that cannot end before the last answer?

The threads of :mod:`concurrent.futures` are joined when the interpreter ends, so that a store which does not answer
would keep a run alive that is over. These are not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def run_at_once(call: Callable[[T], object], items: Collection[T], *, threads: int, name: str) -> None:
    """Call something for each item, so many at a time.

    After the first error nothing more is begun, and it is raised when what is under way has ended; an interrupt is
    raised at once.

    Args:
        call: Takes an item; its result is dropped.
        items: Each is taken once.
        threads: At most so many.
        name: Of the threads.
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
    """Begin something in a thread; its outcome, or its error, is the future's.

    Args:
        call: Does it.
        name: Of the thread.
    """
    future = Future[T]()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  # whatever it is, the caller is to have it
            future.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future
