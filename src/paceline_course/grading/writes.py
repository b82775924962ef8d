"""Which files would an action that Python announces change?"""

from __future__ import annotations

import os
from typing import Any

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Audit events whose first so many arguments are paths that are changed.
_PATHS = {
    "os.chmod": 1,
    "os.chown": 1,
    "os.mkdir": 1,
    "os.remove": 1,
    "os.rename": 2,
    "os.rmdir": 1,
    "os.truncate": 1,
    "os.utime": 1,
    "shutil.rmtree": 1,
}
# A link changes where its new name stands, not what it points to.
_LINKS = ("os.link", "os.symlink")
_NOWHERE = ("/dev/", "/proc/self/")
_SHARED_MEMORY = "/dev/shm"  # which is named to be refused: what is there stays


def is_new_content(args: tuple[Any, ...]) -> bool:
    """Return whether the arguments of an audit event ``open`` say that what was in the file, if any, goes."""
    path, mode, flags = args
    if not isinstance(path, str | bytes | os.PathLike) or os.path.isdir(path):
        return False
    return any(letter in mode for letter in "wx") if isinstance(mode, str) else bool(flags & (os.O_TRUNC | os.O_EXCL))


def written_paths(event: str, args: tuple[Any, ...]) -> list[str]:
    """Return the paths that an audit event (see :func:`sys.audit`) is about to change; most change none."""
    if event == "open":
        path, mode, flags = args
        is_writing = any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool(flags & _WRITING)
        paths = [path] if is_writing else []
    elif event in _LINKS:
        paths = [args[1]]
    else:
        paths = list(args[: _PATHS.get(event, 0)])
    # A number is a file that is open already.
    names = [os.fsdecode(path) for path in paths if isinstance(path, str | bytes | os.PathLike)]
    return [name for name in names if not _is_nowhere(name)]


def _is_nowhere(name: str) -> bool:
    path = os.path.normpath(name)
    return path.startswith(_NOWHERE) and not path.startswith(_SHARED_MEMORY)
