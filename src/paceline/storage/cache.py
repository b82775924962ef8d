"""The cache of remote files on this host: filled, kept up to date, and evicted when space runs out.

Each copy is a separate folder under ``copies``, named by its address and a digest of the address's listing (names,
sizes, ETags). It is filled under a hidden name, and renamed when complete. File locks prevent processes from filling it
twice or evicting a copy that another process reads. The kernel releases them when the process ends, even after SIGKILL.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import StorageError
from paceline.host.system import lock_file
from paceline.parsing.plain_text import load_json
from paceline.parsing.units import format_bytes
from paceline.storage.addresses import Address, is_address, parse_address
from paceline.storage.hub import hub_copy
from paceline.storage.remote import Remote, RemoteFile, Retries, fingerprint, run_concurrently

_MAX_THREADS = 8
_LOG_EVERY_SECONDS = 10.0
_FACTS = "copy.json"
_PARTIAL = ".part-"
_EVICTED = ".going-"

# Descriptors whose shared locks mark copies as in use by this process; they stay open for its lifetime.
_lock_descriptors: dict[Path, int] = {}


@dataclass(frozen=True)
class Cache:
    """Copies of remote files in a folder of this host; any number of processes may use it.

    Attributes:
        root: The folder, created when first needed.
        limit_bytes: Maximum size of all copies; None: half of the free space plus the space that they use now.
    """

    root: Path
    limit_bytes: int | None = None

    @staticmethod
    def from_environment(environment: Mapping[str, str] | None = None) -> Cache:
        """Return the cache configured by ``PACELINE_CACHE`` (folder) and ``PACELINE_CACHE_GB`` (limit).

        Raises:
            StorageError: If the limit is not a positive number.
        """
        values = os.environ if environment is None else environment
        root = Path(
            values.get("PACELINE_CACHE")
            or Path(values.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline" / "storage"
        )
        limit_text = values.get("PACELINE_CACHE_GB")
        if not limit_text:
            return Cache(root)
        try:
            limit = float(limit_text)
        except ValueError:
            limit = 0.0
        if not 0 < limit < float("inf"):
            raise StorageError(f"PACELINE_CACHE_GB={limit_text}, but it must be a number of gigabytes above 0.")
        return Cache(root, int(limit * 1e9))

    @property
    def copies(self) -> Path:
        """The folder that holds the copies."""
        return self.root / "copies"

    def copy_of(self, remote: Remote, log: Callable[[str], None]) -> Path:
        """Return the local copy of a file or folder, fetching it if missing; it is kept for this process's lifetime.

        Args:
            remote: Its address.
            log: Receives progress lines.

        Raises:
            StorageError: If it does not exist, cannot be read, changed during the copy, or does not fit.
        """
        address = remote.address
        files = list_remote(remote)
        name = f"{hashlib.sha256(str(address).encode()).hexdigest()[:12]}-{fingerprint(files)[:12]}"
        try:
            (self.root / "locks").mkdir(parents=True, exist_ok=True)
            self.copies.mkdir(exist_ok=True)
            with locked(self._lock(name), lambda: log(f"{address}: another process is copying it, waiting …")):
                copy = self.copies / name
                if not _is_complete(copy, address, files):
                    shutil.rmtree(copy, ignore_errors=True)
                    self._fill(name, remote, files, log)
                _mark_in_use(self._lock(name, reading=True))
                os.utime(copy)
        except OSError as error:
            raise StorageError(
                f"cannot keep a copy of {address} in {self.root}: {error.strerror or error}; free some space there, or "
                "name another folder with PACELINE_CACHE."
            ) from error
        return copy / address.name

    def _lock(self, name: str, *, reading: bool = False) -> Path:
        return self.root / "locks" / f"{name}.{'read' if reading else 'fill'}"

    def _fill(self, name: str, remote: Remote, files: Mapping[str, RemoteFile], log: Callable[[str], None]) -> None:
        partial = self.copies / f"{_PARTIAL}{name}"
        size = _size(files)
        present = sum(_local_size(partial / remote.address.name / each) for each in files) if partial.exists() else 0
        with locked(self.root / "locks" / "evict"):  # two processes would disturb each other
            self._make_room(size - present, keep=name, address=remote.address, total=size)
        _download(remote, files, partial / remote.address.name, log)
        if fingerprint(list_remote(remote)) != fingerprint(files):
            shutil.rmtree(partial, ignore_errors=True)
            raise StorageError(f"{remote.address} changed while it was copied; try again when nothing writes there.")
        # A power cut can leave empty files under a final name, so sizes are checked before every use.
        facts = {"address": str(remote.address), "size_bytes": size, "files": len(files)}
        (partial / _FACTS).write_text(json.dumps(facts), encoding="utf-8")
        os.replace(partial, self.copies / name)

    def _make_room(self, needed: int, *, keep: str, address: Address, total: int) -> None:
        """Evict the least recently used copies until there is enough space.

        Raises:
            StorageError: If there still is not enough.
        """
        present = {path: _copy_size(path) for path in self.copies.iterdir() if not path.name.endswith(keep)}
        used = sum(present.values())
        free = shutil.disk_usage(self.copies).free
        limit = (free + used) // 2 if self.limit_bytes is None else self.limit_bytes
        for path in sorted(present, key=_used_at):
            if used + needed <= limit and needed <= free:
                break
            if self._evict(path):
                used -= present[path]
                free += present[path]
        if used + needed > limit or needed > free:
            raise StorageError(
                f"{address} takes {format_bytes(total)}, and its copy would not fit in {self.root}: "
                f"{format_bytes(max(limit - used, 0))} of the {format_bytes(limit)} allowed for copies are unused, "
                f"and {format_bytes(free)} of the disk are free. Raise PACELINE_CACHE_GB, or name a folder on a "
                "larger disk with PACELINE_CACHE."
            )

    def _evict(self, path: Path) -> bool:
        """Remove a copy that no process reads or fills; return False if one does."""
        name = path.name.removeprefix(_PARTIAL)
        if path.name.startswith(_EVICTED):
            shutil.rmtree(path, ignore_errors=True)
            return True
        with contextlib.ExitStack() as locks:
            for lock in (self._lock(name), self._lock(name, reading=True)):
                descriptor = os.open(lock, os.O_CREAT | os.O_RDWR, 0o600)
                locks.callback(os.close, descriptor)
                try:
                    lock_file(descriptor, wait=False)
                except OSError:
                    return False
            evicted = path.with_name(f"{_EVICTED}{path.name}-{os.getpid()}")
            with contextlib.suppress(FileNotFoundError):  # who filled it has just ended
                os.replace(path, evicted)
            shutil.rmtree(evicted, ignore_errors=True)
        return True


def list_remote(remote: Remote) -> dict[str, RemoteFile]:
    """Return the files of a folder by relative name; a single file has the empty name.

    Raises:
        StorageError: If the address holds nothing.
    """
    file = remote.stat_file()
    if file is not None:
        return {"": file}
    files = remote.list_files() if remote.address.can_write else {}
    if not files:
        folders = "" if remote.address.can_write else " (a web server provides single files only, not folders)"
        raise StorageError(f"there is nothing at {remote.address}{folders}; check the address.")
    return files


def _download(remote: Remote, files: Mapping[str, RemoteFile], target: Path, log: Callable[[str], None]) -> None:
    total, started = _size(files), time.monotonic()
    missing = {name: file for name, file in files.items() if _local_size(target / name) != file.size_bytes}
    summary = f"{remote.address}: {len(files)} file{'s' * (len(files) > 1)}, {format_bytes(total)}"
    log(f"copying {summary}, to this host" + (", once …" if len(missing) == len(files) else ", what is missing …"))
    done, logged_at, lock = 0, started, threading.Lock()

    def fetch(item: tuple[str, RemoteFile]) -> None:
        nonlocal done, logged_at
        name, file = item
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.part")  # until it has its full size
        remote.download(name, partial, file.size_bytes)
        os.replace(partial, path)
        with lock:
            done += 1
            if time.monotonic() - logged_at > _LOG_EVERY_SECONDS:
                logged_at = time.monotonic()
                log(f"copying {remote.address}: {done} of {len(missing)} files")

    run_concurrently(fetch, missing.items(), threads=_MAX_THREADS, name="storage")
    log(f"copied {summary}, in {time.monotonic() - started:.1f} s")


def _is_complete(copy: Path, address: Address, files: Mapping[str, RemoteFile]) -> bool:
    if not (copy / _FACTS).is_file():
        return False
    root = copy / address.name
    return all(file.size_bytes in (-1, _local_size(root / name)) for name, file in files.items())


def _size(files: Mapping[str, RemoteFile]) -> int:
    return sum(max(file.size_bytes, 0) for file in files.values())


def _local_size(path: Path) -> int:
    """Return a file's size; -2 if it does not exist, which no listing contains."""
    try:
        return path.stat().st_size if path.is_file() else -2
    except OSError:
        return -2


def _copy_size(copy: Path) -> int:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return int(load_json((copy / _FACTS).read_text(encoding="utf-8"))["size_bytes"])
    with contextlib.suppress(OSError):  # another process may be moving it
        return sum(max(_local_size(path), 0) for path in copy.rglob("*"))
    return 0


def _used_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _mark_in_use(path: Path) -> None:
    """Mark a copy as in use by this process and its forks."""
    if path in _lock_descriptors:
        return
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    # On a file system without locks nothing is evicted: the exclusive lock cannot be taken there either.
    with contextlib.suppress(OSError):
        lock_file(descriptor, shared=True)
    _lock_descriptors[path] = descriptor


@contextlib.contextmanager
def locked(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold a lock that other processes of this host see; raises StorageError where there are none."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        try:
            lock_file(descriptor, wait=False)
        except BlockingIOError:
            on_wait()
            lock_file(descriptor)
        except OSError as error:
            raise StorageError(
                f"{path.parent} is on a file system without locks ({error.strerror or error}), which processes need to "
                "coordinate; name a folder on a local disk with PACELINE_CACHE."
            ) from error
        yield
    finally:
        os.close(descriptor)


# Copied once per process: a run keeps using the files that it started with.
_copies: dict[str, Path] = {}


def local_copy(
    address: str, *, key: str = "the address", cache: Cache | None = None, log: Callable[[str], None] | None = None
) -> Path:
    """Copy a file or folder to this host, unless it is cached, and return its path.

    The first process on a host copies; the others wait and use that copy.

    Args:
        address: Its address; see :func:`paceline.storage.addresses.parse_address`.
        key: Its recipe key or option, for messages.
        cache: Where copies are kept; by default the cache configured in the environment.
        log: Receives progress lines; standard error by default.

    Raises:
        StorageError: If it cannot be fetched or does not fit.
    """
    parsed = parse_address(address, key=key)
    log_line = log or functools.partial(print, file=sys.stderr, flush=True)
    if parsed.protocol == "hf":
        return hub_copy(parsed, log_line)
    if cache is not None:
        return cache.copy_of(Remote(parsed, Retries(log=log_line)), log_line)
    if str(parsed) not in _copies:
        _copies[str(parsed)] = Cache.from_environment().copy_of(Remote(parsed, Retries(log=log_line)), log_line)
    return _copies[str(parsed)]


def local_path(text: str, *, key: str) -> str:
    """Return a path unchanged; for an address, the path of its local copy."""
    return str(local_copy(text, key=key)) if is_address(text) else text
