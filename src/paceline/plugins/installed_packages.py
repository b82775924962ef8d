"""What installed packages register, remembered: reading the metadata of all of them takes about 100 ms.

A remembered result is used as long as this interpreter finds the same packages, by the names and times of their
metadata. It is a JSON file in the user's cache folder; one that is damaged, or that another user may have written, is
ignored.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from paceline.host.machine import cache_folder
from paceline.parsing.files import TOO_FRESH_NS, remember
from paceline.parsing.plain_text import load_json
from paceline.version import __version__

_FORMAT = 1
_GROUPS = "paceline."


@cache
def entry_points() -> dict[str, list[list[str]]]:
    """Return the entry points in groups that begin with ``paceline.``, as names and references, sorted, by group."""
    found: dict[str, list[list[str]]] = recall("entry-points", _read_entry_points)
    return found


def recall(kind: str, find: Callable[[], tuple[Any, Iterable[str] | None]]) -> Any:
    """Return the result of ``find``, computed once for the packages that are installed.

    Args:
        kind: Name of the result.
        find: Returns the result, which JSON can hold, and the source files that it also depends on; None for them, if
            it must not be remembered.
    """
    packages = _metadata()
    state = [_FORMAT, __version__, sys.version, packages]
    place = repr([sys.executable, *dict.fromkeys(folder for folder, _, _ in packages)])
    path = cache_folder() / "installed" / f"{kind}-{zlib.crc32(place.encode(errors='backslashreplace')):08x}.json"
    with suppress(OSError, ValueError, LookupError, TypeError):
        stored = load_json(_read_own(path))
        if stored["state"] == state and stored["files"] == _times(stored["files"]):
            return stored["found"]
    found, files = find()
    if files is not None and max((changed for _, _, changed in packages), default=0) < time.time_ns() - TOO_FRESH_NS:
        remember(path, json.dumps({"state": state, "files": _times(files), "found": found}).encode())
    return found


def _metadata() -> list[list[Any]]:
    """Return folder, name and time of change of each package's metadata, in the order of the search."""
    found: list[list[Any]] = []
    for folder in map(str, sys.path):
        with suppress(OSError):
            names = [""] if os.path.isfile(folder) else sorted(os.listdir(folder or os.curdir))  # an archive is one
            for name in names:
                if not name or name.lower().endswith(("dist-info", "egg-info")):
                    place = os.path.join(folder, name) if name else folder
                    # Those of a checkout are written over, which does not change the folder.
                    found.append([folder, name, max(_times([place, f"{place}/entry_points.txt"]).values(), default=0)])
    return found


def _times(files: Iterable[str]) -> dict[str, int]:
    """Return the times of change of files, without those that are missing."""
    times = {}
    for file in files:
        with suppress(OSError):
            times[file] = os.stat(file).st_mtime_ns
    return times


def _read_own(path: Path) -> bytes:
    """Read a file that only this user can have written; raises OSError."""
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        # Windows knows neither owners nor modes: there, the folder's own permissions protect it.
        if hasattr(os, "geteuid") and (status.st_uid != os.geteuid() or status.st_mode & 0o022):
            raise PermissionError(path)
        return file.read()


def _read_entry_points() -> tuple[dict[str, list[list[str]]], tuple[()]]:
    from importlib.metadata import distributions  # slow to import

    found: dict[str, set[tuple[str, str]]] = {}
    seen = set()
    for package in distributions():
        try:
            points = [each for each in package.entry_points if each.group.startswith(_GROUPS)]
            if not points or package.name in seen:  # the first of two copies is the one that is imported
                continue
        except Exception:  # noqa: BLE001  # any package's metadata may be malformed
            continue
        seen.add(package.name)
        for each in points:
            found.setdefault(each.group, set()).add((each.name, each.value))
    return {group: sorted(map(list, names)) for group, names in found.items()}, ()
