"""Copies of single files of an address, for data that do not fit on this host: the least recently used are deleted.

On Linux and other systems of its kind a deleted file stays readable for those that have it open.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import StorageError
from paceline.host.system import lock_file
from paceline.parsing.units import format_bytes
from paceline.storage.addresses import parse_address
from paceline.storage.cache import Cache, list_remote, locked
from paceline.storage.remote import Remote, RemoteFile, Retries

_PARTIAL, _RESERVED = ".part-", ".room-"
_STALE_SECONDS = 3600  # what a killed process left
_WAIT_SECONDS = 0.02


@dataclass(repr=False)
class FileCache:
    """Files below an address; any number of processes of this host share the copies.

    Attributes:
        address: Where the files are.
        files: Their sizes and tags by name.
        cache: Where copies are kept, and how large they may be in all.
    """

    address: str
    files: Mapping[str, RemoteFile]
    cache: Cache

    @classmethod
    def of(cls, address: str) -> FileCache:
        """List an address; raises StorageError if nothing is there."""
        if parse_address(address).protocol == "hf":
            raise StorageError(
                f"{address} cannot be read file by file; download it (hf download), and give the folder."
            )
        files = list_remote(_remote(address))
        if "" in files:  # the address of a single file
            address, _, name = address.strip().rstrip("/").rpartition("/")
            files = {name: files[""]}
        return cls(address, files, Cache.from_environment())

    @property
    def names(self) -> list[str]:
        """The files' names, with folders, below the address."""
        return [*self.files]

    def __repr__(self) -> str:
        return f"FileCache({self.address!r})"

    def stamp(self, name: str) -> tuple[int, str]:
        """Return a file's size and tag, which change with it."""
        return self.files[name].size_bytes, self.files[name].tag

    def local(self, name: str) -> Path:
        """Return the copy of a file, fetching it if missing.

        Raises:
            StorageError: If it cannot be read, or does not fit.
        """
        key = hashlib.sha256(f"{self.address}\0{name}\0{self.stamp(name)}".encode()).hexdigest()[:16]
        copy = self._root / f"{key}-{name.rpartition('/')[2]}"
        try:
            while not _touched(copy):
                self._root.mkdir(parents=True, exist_ok=True)
                with locked(self._root / f".lock-{key[:2]}"):
                    if not copy.exists():
                        self._fetch(name, copy)
        except OSError as error:
            raise StorageError(
                f"cannot keep a copy of {self.address}/{name} in {self._root} ({error.strerror or error}); free some "
                "space there, or name another folder with PACELINE_CACHE."
            ) from error
        return copy

    @property
    def _root(self) -> Path:
        return self.cache.root / "files"

    def _fetch(self, name: str, copy: Path) -> None:
        partial, reserved = (copy.with_name(f"{mark}{copy.name}") for mark in (_PARTIAL, _RESERVED))
        size = max(self.files[name].size_bytes, 0)
        while True:
            with locked(self._root / ".lock"):
                if self._make_room(size, name):
                    room = reserved.open("wb")  # takes no space; other processes count its size while it is locked
                    room.truncate(size)
                    lock_file(room)
                    break
            time.sleep(_WAIT_SECONDS)
        with room:
            _remote(self.address).download(name, partial, self.files[name].size_bytes)
            os.replace(partial, copy)
            reserved.unlink()

    def _make_room(self, needed: int, name: str) -> bool:
        """Delete the least recently used copies until a file fits; returns False while others are being fetched.

        Raises:
            StorageError: If it never will.
        """
        copies, reserved = list[tuple[float, int, Path]](), 0
        for each in self._root.iterdir():
            with contextlib.suppress(OSError):  # another process has just renamed it
                status = each.stat()
                if not each.name.startswith("."):
                    copies.append((status.st_mtime, status.st_size, each))
                elif each.name.startswith(_RESERVED):
                    reserved += _reserved(each)
                elif each.name.startswith(_PARTIAL) and status.st_mtime < time.time() - _STALE_SECONDS:
                    each.unlink()
        used, free = sum(size for _, size, _ in copies), shutil.disk_usage(self._root).free
        limit = (free + used) // 2 if self.cache.limit_bytes is None else self.cache.limit_bytes
        if needed > limit:
            raise StorageError(
                f"{self.address}/{name} takes {format_bytes(needed)}, and {format_bytes(limit)} are allowed for copies "
                f"in {self.cache.root}; raise PACELINE_CACHE_GB, or name a larger disk with PACELINE_CACHE."
            )
        for _, size, each in sorted(copies):
            if used + reserved + needed > limit:
                each.unlink(missing_ok=True)
                used -= size
        return used + reserved + needed <= limit


def _touched(copy: Path) -> bool:
    """Mark a copy as just used; returns False if there is none, as another process may have deleted it."""
    try:
        os.utime(copy)
    except FileNotFoundError:
        return False
    return True


def _reserved(path: Path) -> int:
    """Return the bytes that a process keeps for itself; one that was killed keeps none."""
    with path.open("rb") as room:
        try:
            lock_file(room, wait=False, shared=True)
        except BlockingIOError:
            return os.fstat(room.fileno()).st_size
        path.unlink()
        return 0


_remotes: dict[tuple[int, str], Remote] = {}


def _remote(address: str) -> Remote:
    """Return this process's own connection: the libraries of stores do not work in a forked one."""
    key = os.getpid(), address
    if key not in _remotes:
        _remotes[key] = Remote(parse_address(address), Retries())
    return _remotes[key]
