"""The lock of a run directory."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import secrets
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from paceline.errors import RunDirectoryError
from paceline.host.system import NO_LINK, lock_file
from paceline.records.run_directory import RunDirectory, file_operation

# How long a killed process may take to disappear, with all that it had started.
_DYING_SECONDS = 10.0


class RunLock:
    """Lock that prevents two launches from writing to one run directory; the system releases it even after SIGKILL."""

    def __init__(self, directory: RunDirectory, *, is_new: bool = False) -> None:
        self._root, self._is_new = directory.root, is_new
        path = directory.root / ".lock"
        with file_operation("open", path):
            self._descriptor = os.open(path, os.O_CREAT | os.O_RDWR | NO_LINK)
        deadline = time.monotonic() + _DYING_SECONDS
        while not self._is_taken():
            holder = (read_if_present(path) or "").partition(",")[0]
            if _is_dying(holder) and time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            os.close(self._descriptor)
            raise RunDirectoryError(
                f"another process is training in '{directory.root}'{f' ({holder})' if holder else ''}, or a run that "
                "failed still saves there; wait for it, stop it, or choose another run directory."
            )
        with contextlib.suppress(OSError):  # only for the message above
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, lock_owner().encode())

    def _is_taken(self) -> bool:
        try:
            lock_file(self._descriptor, wait=False)
        except BlockingIOError:
            return False
        except OSError:
            pass  # a file system without locks: the check is best effort
        return True

    def hold_until(self, save: Future[Any]) -> None:
        """Keep other launches out until this save has ended, even if the lock is released earlier."""
        # The system holds the lock as long as one of its descriptors is open.
        duplicate = os.dup(self._descriptor)
        save.add_done_callback(lambda _: os.close(duplicate))

    def release(self) -> None:
        """Release the lock; an empty directory created for this run is removed."""
        # A missing directory must not hide why the run ends.
        with contextlib.suppress(OSError):
            if self._is_new and os.listdir(self._root) == [".lock"]:
                (self._root / ".lock").unlink()
                self._root.rmdir()
        os.close(self._descriptor)


def lock_owner() -> str:
    """Write the lock's owner, with a token that is new each time: an older file may have been copied along."""
    return f"process {os.getpid()} on {platform.node()}, {secrets.token_hex(8)}"


def _is_dying(holder: str) -> bool:
    """Whether the owner of a lock was killed: its locks, and those of its loader processes, go a little later."""
    found = re.fullmatch(r"process (\d+) on (.+)", holder)
    if found is None or found[2] != platform.node() or not Path("/proc/self/environ").exists():
        return False
    try:
        return not Path(f"/proc/{found[1]}/environ").read_bytes()  # it has no memory any more
    except PermissionError:
        return False
    except OSError:
        return True


def read_if_present(path: Path) -> str | None:
    """Return a file's text; None if it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text()
    return None
