"""Local copies of files and folders at an address, which readers open like any others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from paceline.storage.addresses import is_address, parse_address
from paceline.storage.cache import Cache
from paceline.storage.remote import Remote
from paceline.storage.retries import Retries

# Copied once in a process: a run keeps using the files that it began with.
_copied: dict[str, Path] = {}


def local_copy(
    address: str, *, key: str = "the address", cache: Cache | None = None, say: Callable[[str], None] | None = None
) -> Path:
    """Copy a file or folder to this host, if it is not here already, and return where it lies.

    Whichever process of a host comes first copies; the others wait for it, and find it.

    Args:
        address: Where it lies; see :func:`paceline.storage.addresses.parse_address`.
        key: What it was given as, for messages.
        cache: Where copies are kept; the one of the environment by default.
        say: Takes lines about what goes on; standard error by default.

    Raises:
        StorageError: If it cannot be had, or there is no room for it.
    """
    found = parse_address(address, key=key)
    tell = say or _to_standard_error
    if cache is not None:
        return cache.copy_of(Remote(found, Retries(told=tell)), tell)
    if str(found) not in _copied:
        _copied[str(found)] = Cache.of_environment().copy_of(Remote(found, Retries(told=tell)), tell)
    return _copied[str(found)]


def local_path(text: str, *, key: str) -> str:
    """A path as it is; of an address, where its copy lies."""
    return str(local_copy(text, key=key)) if is_address(text) else text


def _to_standard_error(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
