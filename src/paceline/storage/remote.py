"""List, read, write and delete files at an address, and retry temporary failures."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import inspect
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from types import MethodType
from typing import Any, TypeVar

from paceline.errors import StorageError
from paceline.storage.addresses import Address, check_library, parse_address, redact_secrets

T = TypeVar("T")
_MAX_THREADS = 8
# Read timeout of a server, in seconds.
_MIN_READ_TIMEOUT, _MAX_READ_TIMEOUT = 5.0, 60.0
# The option with a library's timeouts; Azure's library limits its waits itself.
_TIMEOUT_KEYS = {
    "s3": "config_kwargs",
    "gs": "requests_timeout",
    **dict.fromkeys(("http", "https"), "client_kwargs"),
}
_REPEATED_BY_GCSFS = ("_request", "_get_file_request", "_get_file_concurrent")  # five times, with tracebacks
_TAGS = (
    *("ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "Digest"),
    *("LastModified", "Last-Modified", "last_modified", "mtime", "created"),
)


@dataclass(frozen=True)
class RemoteFile:
    """One file of a listing.

    Attributes:
        size_bytes: Its size.
        tag: Its ETag or modification time, which changes with the file.
    """

    size_bytes: int
    tag: str


class Remote:
    """The files at and below an address; thread-safe.

    Args:
        address: Their address.
        retries: Retry policy.

    Raises:
        StorageError: If the protocol's library is missing; later, if a request fails permanently.
    """

    def __init__(self, address: Address | str, retries: Retries | None = None) -> None:
        self.address = parse_address(address) if isinstance(address, str) else address
        self.retries = retries or Retries()
        check_library(self.address)
        self._files = self.retries(f"open {self.address}", self._open)

    def _open(self) -> Any:
        import fsspec

        # Cached listings would be out of date.
        options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
        protocol = self.address.protocol
        key = _TIMEOUT_KEYS.get(protocol)
        if key is not None and key not in fsspec.config.conf.get(protocol, {}):
            # A server that accepts a connection and never answers must fail the request before the user gives up.
            timeout = min(max(self.retries.patience_seconds, _MIN_READ_TIMEOUT), _MAX_READ_TIMEOUT)
            if protocol == "s3":
                options[key] = {"connect_timeout": 10, "read_timeout": timeout, "retries": {"max_attempts": 1}}
            else:
                from aiohttp import ClientTimeout

                # A web server is asked twice about a file, and a store up to four times.
                limits = ClientTimeout(total=None, sock_connect=10, sock_read=max(timeout / 4, _MIN_READ_TIMEOUT))
                options[key] = limits if protocol == "gs" else {"timeout": limits}
        if protocol == "file":
            options = {"auto_mkdir": True}
        files = fsspec.filesystem(protocol, **options)
        if protocol == "s3":
            # s3fs silently retries five times whatever botocore's settings; retrying is left to Retries.
            files.retries = 1
        for name in _REPEATED_BY_GCSFS if protocol == "gs" else ():
            if method := getattr(type(files), name, None):
                setattr(files, name, MethodType(inspect.unwrap(method), files))
        return files

    def path(self, name: str = "") -> str:
        """Return the full address of a file, or of the address itself."""
        return f"{self.address}/{name}" if name else str(self.address)

    def list_files(self, folder: str = "") -> dict[str, RemoteFile]:
        """Return all files below the address or one of its folders, by name relative to the address; may be empty.

        Raises:
            StorageError: If a name would escape the folder it is copied to.
        """
        url = self.path(folder)
        listing: Mapping[str, Any] = self._ask(f"list {url}", lambda: self._files.find(url, detail=True)) or {}
        prefix = self._files._strip_protocol(self.path()) + "/"  # noqa: SLF001  # fsspec names it for others to use, and has no public one
        files = {}
        for path, info in sorted(listing.items()):
            name = str(path).removeprefix(prefix)
            if info.get("type") == "directory" or name.endswith("/") or not str(path).startswith(prefix):
                continue
            if any(part in ("", ".", "..") for part in name.split("/")) or "\\" in name:
                raise StorageError(f"{url} holds the name {name!r}, which is not a valid file name here.")
            files[name] = _facts(info)
        return files

    def stat_file(self, name: str = "") -> RemoteFile | None:
        """Return facts about the file at the address or below it; None for a folder, or if nothing exists."""
        url = self.path(name)
        info: Mapping[str, Any] | None = self._ask(f"look at {url}", lambda: self._files.info(url))
        return None if info is None or info.get("type") == "directory" else _facts(info)

    def _ask(self, action: str, call: Callable[[], Any]) -> Any:
        """Return the result of a request; None if there is nothing."""

        def call_or_none() -> Any:
            try:
                return call()
            except FileNotFoundError as error:
                # fsspec takes any failure of a web server for a missing file.
                cause = error.__cause__ if self.address.protocol in ("http", "https") else None
                is_missing = isinstance(cause, FileNotFoundError) or getattr(cause, "status", 0) in (404, 410)
                if cause is not None and not is_missing:
                    raise cause from None
                return None

        return self.retries(action, call_or_none)

    def read(self, name: str) -> bytes:
        """Return the content of a small file."""
        url = self.path(name)
        content: bytes = self.retries(f"read {url}", lambda: self._files.cat_file(url))
        return content

    def download(self, name: str, target: Path, size_bytes: int = -1) -> None:
        """Copy a file to a local one; ``target`` is incomplete until this returns.

        Args:
            name: Relative to the address.
            target: The local file; existing content is replaced.
            size_bytes: Its expected size; -1 if unknown.
        """
        url = self.path(name)
        self.retries(f"read {url}", partial(self._download, url, target, size_bytes))

    def _download(self, url: str, target: Path, size_bytes: int) -> None:
        self._files.get_file(url, str(target))
        size = target.stat().st_size
        if size_bytes not in (-1, size):
            raise OSError(f"{size} bytes arrived of {size_bytes}")

    def upload(self, source: Path, name: str, progress: Callable[[int], None] | None = None) -> None:
        """Upload a local file; the upload is atomic if the protocol guarantees it (S3, GCS, Azure).

        Args:
            source: The local file.
            name: Relative to the address.
            progress: Called from time to time with the number of bytes sent in this attempt.
        """
        url = self.path(name)
        self.retries(f"write {url}", partial(self._upload, source, url, progress))

    def _upload(self, source: Path, url: str, progress: Callable[[int], None] | None) -> None:
        from fsspec.callbacks import Callback

        def hook(_size: int, value: int, **_: object) -> None:
            if progress is not None:
                progress(value)

        self._files.put_file(str(source), url, callback=Callback(hooks={"progress": hook}))

    def write(self, name: str, content: bytes) -> None:
        """Write a small file."""
        url = self.path(name)
        self.retries(f"write {url}", lambda: self._files.pipe_file(url, content))

    def delete(self, names: Collection[str]) -> None:
        """Delete files; missing ones are ignored."""
        run_concurrently(
            lambda name: self.retries(f"delete {self.path(name)}", partial(self._delete, name)),
            names,
            threads=_MAX_THREADS,
            name="storage",
        )

    def _delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self.path(name))
        if self.address.protocol == "file":
            # On a disk, unlike in an object store, a folder remains when its last file is deleted.
            with contextlib.suppress(OSError):
                for folder in list(PurePosixPath(name).parents)[:-1]:
                    Path(self.address.path, folder).rmdir()


def fingerprint(files: Mapping[str, RemoteFile]) -> str:
    """Return a digest of names, sizes and tags that changes with any of them."""
    digest = hashlib.sha256()
    for name, file in sorted(files.items()):
        digest.update(f"{name}\0{file.size_bytes}\0{file.tag}\n".encode())
    return digest.hexdigest()


def _facts(info: Mapping[str, Any]) -> RemoteFile:
    tags = [str(info[key]) for key in _TAGS if info.get(key) is not None]
    size = info.get("size")
    return RemoteFile(-1 if size is None else int(size), tags[0] if tags else "")


def run_concurrently(call: Callable[[T], object], items: Collection[T], *, threads: int, name: str) -> None:
    """Call a function for each item, in several threads.

    After the first error no more calls are started, and it is raised when the running ones have ended. An interrupt is
    raised at once.

    Args:
        call: Takes an item; its result is dropped.
        items: Each is processed once.
        threads: Maximum number of threads.
        name: Name of the threads.
    """
    remaining, errors = list(reversed(list(items))), list[BaseException]()

    def work() -> None:
        while not errors:
            try:
                item = remaining.pop()
            except IndexError:
                return
            try:
                call(item)
            except BaseException as error:  # noqa: BLE001  # whatever it is, the caller is to have it
                errors.append(error)

    workers = [threading.Thread(target=work, name=name, daemon=True) for _ in range(min(threads, len(remaining)))]
    for each in workers:
        each.start()
    try:
        for each in workers:
            each.join()
    except BaseException as error:
        errors.append(error)
        raise
    if errors:
        raise errors[0]


def run_in_thread(call: Callable[[], T], *, name: str) -> Future[T]:
    """Call a function in a thread; the future holds its result or error.

    Args:
        call: Runs in the thread.
        name: Name of the thread.
    """
    future = Future[T]()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  # whatever it is, the caller is to have it
            future.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future


_FIRST_PAUSE_SECONDS = 0.2
_MAX_PAUSE_SECONDS = 10.0
# Errors that would recur on another attempt.
_PERMANENT = (
    *(FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError),
    *(ImportError, TypeError),
)
_PERMANENT_NAMES = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "ParamValidationError")
_PERMANENT_ON_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG)
_ADVICE = {
    **dict.fromkeys(("FSTimeoutError", "SocketTimeoutError"), "the server sent nothing in time; check that it works"),
    "FileNotFoundError": "check the address: bucket and path must exist",
    "PermissionError": "check the credentials in the environment, and their permissions there",
    "NoCredentialsError": "set them in the environment (docs/guide/object-storage.md)",
    "PartialCredentialsError": "set all of them in the environment (docs/guide/object-storage.md)",
}


@dataclass
class Retries:
    """Retry policy for temporary failures: pauses double from 0.2 to 10 seconds, each randomly shortened by up to half.

    Attributes:
        patience_seconds: How long to retry one request.
        log: Receives one line when a request succeeds after failing.
        cancelled: Set when the result is no longer needed: pauses end at once and nothing is retried.
    """

    patience_seconds: float = 60.0
    log: Callable[[str], None] = field(default=lambda _: None)
    cancelled: threading.Event = field(default_factory=threading.Event)
    # A separate generator, because the global one belongs to the run.
    _random: random.Random = field(default_factory=random.Random, repr=False)

    def __call__(self, action: str, call: Callable[[], T]) -> T:
        """Call a function and retry it if it fails.

        Args:
            action: What it does, as a verb phrase after "cannot": ``read s3://bucket/x``.
            call: The request.

        Raises:
            StorageError: If the failure is permanent, patience ran out, or retries were cancelled.
        """
        started = time.monotonic()
        failures, reason = 0, ""
        while True:
            if self.cancelled.is_set():
                raise StorageError(f"cannot {action}{f' ({reason})' if failures else ''}: it was abandoned.")
            try:
                result = call()
            except Exception as error:  # noqa: BLE001  # each protocol's library has errors of its own
                failures += 1
                waited = time.monotonic() - started
                if _is_permanent(error) or waited >= self.patience_seconds or self.cancelled.is_set():
                    raise StorageError(_failure_message(action, error, failures, waited)) from None
                reason = describe(error)
            else:
                if failures:
                    waited = time.monotonic() - started
                    self.log(
                        f"{action}: done after {failures} failure{'s' * (failures > 1)} and {waited:.1f} s ({reason})"
                    )
                return result
            pause = min(_FIRST_PAUSE_SECONDS * 2 ** (failures - 1), _MAX_PAUSE_SECONDS)
            self.cancelled.wait(pause * self._random.uniform(0.5, 1.0))


def describe(error: BaseException) -> str:
    """Describe an error in one line, without secrets."""
    text = " ".join(redact_secrets(str(error)).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _is_permanent(error: Exception) -> bool:
    return (
        isinstance(error, _PERMANENT)
        or type(error).__name__ in _PERMANENT_NAMES
        or (isinstance(error, OSError) and error.errno in _PERMANENT_ON_DISK)
    )


def _failure_message(action: str, error: Exception, failures: int, waited: float) -> str:
    advice = _ADVICE.get(type(error).__name__, "check the address, the network and the server")
    tries = "" if failures == 1 else f" ({failures} tries in {waited:.0f} s)"
    return f"cannot {action}{tries}: {describe(error)}; {advice}."
