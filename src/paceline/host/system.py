"""What differs between operating systems: locks of files, signals, limits, forks, and folders that can be flushed.

Windows has no ``flock``, masks of signals, SIGUSR1 or fork; what it lacks is left out here, in one place.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from multiprocessing.context import ForkContext

# Files are opened with these where the system knows them.
NO_LINK = getattr(os, "O_NOFOLLOW", 0)
FOLDER = getattr(os, "O_DIRECTORY", 0)


def existing_signals(*names: str) -> tuple[signal.Signals, ...]:
    """Return those of the named signals that this system has."""
    return tuple(getattr(signal, name) for name in names if hasattr(signal, name))


# Signals that request a stop, whichever of the run's processes they reach: launchers forward them, ranks finish their
# step, and loader processes, which also receive them from a terminal or a scheduler, leave them to the ranks.
STOP_SIGNALS = existing_signals("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")


def _posix_module(name: str) -> Any:
    """Return a module of Python that Windows lacks; there, None."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def lacking() -> dict[str, str]:
    """Return the features of POSIX that this system lacks, with what is left out for that reason."""
    left_out = {
        "flock": "keeping two launches out of one run directory; copies of object storage",
        "fork": "check-data, review, and the test whether a data set gives the same samples again",
        "SIGUSR1": "stopping by SIGUSR1 and SIGUSR2, as job schedulers do",
    }
    has = {
        "flock": _posix_module("fcntl") is not None,
        "fork": hasattr(os, "fork"),
        "SIGUSR1": bool(existing_signals("SIGUSR1")),
    }
    return {name: what for name, what in left_out.items() if not has[name]}


def lock_file(file: int | IO[Any], *, wait: bool = True, shared: bool = False) -> None:
    """Lock an open file until it is closed, which the system also does when the process ends.

    Args:
        file: The file, or its descriptor.
        wait: Wait until others have released it.
        shared: Let others take shared locks too.

    Raises:
        BlockingIOError: If another process holds it and ``wait`` is false.
        OSError: If the file system, or the operating system, has no such locks.
    """
    fcntl = _posix_module("fcntl")
    if fcntl is None:
        raise OSError(errno.ENOLCK, "this operating system has no flock")
    fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))


def forking() -> ForkContext:
    """Return the means to fork processes, which share this one's objects instead of receiving copies of them.

    Raises:
        PacelineError: If this system cannot fork.
    """
    import multiprocessing  # slow to import

    try:
        return multiprocessing.get_context("fork")
    except ValueError:
        raise PacelineError(
            f"this command reads files in forked processes, which this system ({sys.platform}) lacks: use Linux, macOS "
            "or WSL."
        ) from None


def address_space_limit() -> int | None:
    """Return how many bytes of address space this process may use (``ulimit -v``); None without a limit."""
    resource = _posix_module("resource")
    if resource is None:
        return None
    limit: int = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def peak_memory() -> int:
    """Return the highest resident memory of this process so far, in bytes; 0 where the system does not tell.

    On Linux it starts at the peak of the parent that forked this process.
    """
    resource = _posix_module("resource")
    if resource is None:
        return 0
    peak: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, others KiB


@contextmanager
def blocked_signals(numbers: Iterable[signal.Signals] = STOP_SIGNALS) -> Iterator[None]:
    """Hold back signals to this thread, and to processes and threads it starts, where the system can."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def receive_signals(numbers: Iterable[signal.Signals] = STOP_SIGNALS) -> None:
    """Let signals that the parent process held back reach this thread."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
