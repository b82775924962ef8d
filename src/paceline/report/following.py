"""What is new in a run's events, while it writes them, and goes back to a checkpoint now and then?

The file is opened anew each time, as a network's file system shows then what another host has written.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.errors import RunDirectoryError
from paceline.records.reader import read_environment
from paceline.records.run_directory import RunDirectory, cannot
from paceline.records.writer import parse_line


class EventFollower:
    """Reads a growing file of events; lines that are not whole yet are read the next time.

    Args:
        path: The file, which need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._number = 0
        self._last = b""

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Whether the file was cut back since, and what is new: after a cut, all of it.

        Raises:
            RunDirectoryError: If the file cannot be read, or a line is no event.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(max(0, self._offset - len(self._last)))
                found = file.read()
                is_cut = not found.startswith(self._last)
                if is_cut:
                    self._offset, self._number, self._last = 0, 0, b""
                    file.seek(0)
                    found = file.read()
        except FileNotFoundError:
            is_cut = self._offset > 0
            self._offset, self._number, self._last = 0, 0, b""
            return is_cut, []
        except OSError as error:
            raise cannot("read", self._path, error) from error
        return is_cut, self._events(found[len(self._last) :])

    def _events(self, found: bytes) -> list[dict[str, Any]]:
        events = []
        for line in found.splitlines(keepends=True):
            # A network's file system may show a line's place before it shows its text.
            if not line.endswith(b"\n") or b"\0" in line:
                break
            self._number += 1
            event = parse_line(line, self._path, self._number, is_last=False)
            assert event is not None  # only lines without their end are
            events.append(event)
            self._offset += len(line)
            self._last = line
        return events


def is_being_trained(directory: RunDirectory) -> bool | None:
    """Whether a process trains in a run directory now; None where that cannot be known from here.

    The lock is not tried, only looked up: a run that begins at this very moment must find it free.
    """
    if read_environment(directory).get("host") != socket.gethostname():
        return None
    try:
        inode = (directory.root / ".lock").stat().st_ino
        locks = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except (OSError, RunDirectoryError):
        return None
    return is_locked(locks, inode)


def is_locked(locks: Iterable[str], inode: int) -> bool:
    """Whether one of the lines of ``/proc/locks`` is of a file, which they name as ``MAJOR:MINOR:INODE``."""
    return any(re.fullmatch(rf"[^:]+:[^:]+:{inode}", word) for lock in locks for word in lock.split())
