"""A command that is asked to end still ends what it has started, and takes its temporary files away."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def ends_in_order() -> Iterator[None]:
    """Take a request to end (SIGTERM), or a terminal that is closed (SIGHUP), as an exit; SIGINT is one in Python.

    What was to be ignored, as SIGHUP under ``nohup``, still is.
    """
    previous = {number: signal.getsignal(number) for number in _SIGNALS}
    heard = [number for number in _SIGNALS if previous[number] != signal.SIG_IGN]
    for number in heard:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, previous[number])


def _end(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)
