"""How a program leaves its loop: on purpose, with an error, or by ending while it is in the body."""

from __future__ import annotations

import contextlib
import dis
import gc
import os
import sys
import threading
import weakref
from collections.abc import Generator
from types import FrameType, TracebackType
from typing import Any


def close_at_exit(steps: Generator[tuple[int, Any], None, None]) -> None:
    """Have the loop end with the program, if that has left the loop's body but still holds its iterator."""
    held, process = weakref.ref(steps), os.getpid()

    def close() -> None:
        steps, error = held(), getattr(sys, "last_value", None)
        if steps is None or os.getpid() != process:  # a forked one has not left the body
            return
        if error is None:
            steps.close()
        else:  # which has ended the program, and was shown
            with contextlib.suppress(type(error)):
                steps.throw(error)

    # Not `atexit`: no thread can be started there, and a save needs one.
    threading._register_atexit(close)  # type: ignore[attr-defined]  # noqa: SLF001  # atexit runs after threads ended


def left_on_purpose(frame: FrameType | None) -> bool:
    """Whether the body left the loop without an exception, also through a generator around the loop such as tqdm's."""
    while frame is not None:
        raised = {each.tb_lasti for each in gc.get_referrers(frame) if isinstance(each, TracebackType)}
        if frame.f_lasti not in raised and _operation(frame, frame.f_lasti) not in ("RERAISE", "RAISE_VARARGS"):
            return True
        if not {_operation(frame, each) for each in raised} & {"YIELD_VALUE", "RESUME"}:
            return False
        frame = frame.f_back  # this one is a generator that is being closed
    return True


def _operation(frame: FrameType, at: int) -> str:
    return dis.opname[frame.f_code.co_code[at]] if at >= 0 else ""
