"""Repositories of the Hugging Face hub: copies in its library's own cache, and uploads.

A copy is looked for in the cache first, and there a run keeps working without a network.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from paceline.errors import StorageError
from paceline.storage.addresses import Address, parse_address
from paceline.storage.remote import describe

_FORM = re.compile(r"(datasets/)?([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.+))?")
_WAIT_SECONDS = 10.0  # for the next bytes of a server
_COMMIT_SECONDS = 30.0  # the same for the answer to an upload
_RESUMED_WAIT_SECONDS = 5  # the same in a download, which the library resumes five times
_MOST_PATIENCE_SECONDS = 30  # the longest pause that a server may ask for
_MOST_TRIES = 3  # of a request to a server that asks for a pause
_MODEL = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[^/]+)?")


def model_files(name: str, *, key: str, files: Collection[str], optional: Collection[str] = ()) -> Path:
    """Return a folder with files of a model: the local one of this name, or else the copy of ``OWNER/NAME`` on the hub.

    Args:
        name: A folder, or ``OWNER/NAME``, with ``@REVISION`` for a branch, a tag or a commit. Any other text is
            returned as a path.
        key: The recipe key, for messages.
        files: As in :func:`hub_copy`.
        optional: As in :func:`hub_copy`.

    Raises:
        StorageError: If the repository is neither in the cache nor available from the hub.
    """
    path = Path(name).expanduser()
    if path.exists() or not _MODEL.fullmatch(name):
        return path
    try:
        return repository_copy(name, key=key, files=files, optional=optional)
    except StorageError as error:
        raise StorageError(f"{key}: there is no folder {name} here, and {error}") from None


def repository_copy(name: str, *, key: str, files: Collection[str], optional: Collection[str] = ()) -> Path:
    """Return the local copy of the model ``OWNER/NAME`` as :func:`hub_copy` does; downloads are noted on stderr."""
    address = parse_address(f"hf://{name}", key=key)
    return hub_copy(address, lambda line: sys.stderr.write(f"{line}\n"), files=files, optional=optional)


def hub_copy(
    address: Address, log: Callable[[str], object], *, files: Collection[str] = (), optional: Collection[str] = ()
) -> Path:
    """Return the local copy of a repository on the hub, or of a path in it; download only what the cache lacks.

    What is complete in the cache is used without asking the hub for a newer version.

    Args:
        address: ``hf://OWNER/NAME`` for a model, ``hf://datasets/OWNER/NAME`` for a data set; ``@REVISION`` and a path
            may follow.
        log: Receives a line before a download.
        files: Shell patterns of the only files needed, as far as the repository has them; all if empty. A copy in the
            cache must have one of each.
        optional: Patterns of files that many repositories lack.

    Raises:
        StorageError: If the address is not of this form, or is neither in the cache nor available from the hub.
    """
    try:
        from huggingface_hub import constants, get_cached_repo_tree, snapshot_download
        from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError
    except ImportError as error:
        raise StorageError(
            f"{address} needs huggingface_hub 2.4 or newer ({error}); install it with: pip install --upgrade "
            "huggingface_hub."
        ) from None
    match = _FORM.fullmatch(address.path)
    if match is None:
        raise StorageError(
            f"{address} is not an address on the Hugging Face hub, which is hf://OWNER/NAME for a model or "
            "hf://datasets/OWNER/NAME for a data set."
        )
    kind, (repository, revision, path) = "dataset" if match[1] else "model", match.groups()[1:]
    patterns = [path, f"{path}/*"] if path else [*files, *optional] or None

    def snapshot(*, cached: bool) -> Path:
        folder = snapshot_download(
            repository, repo_type=kind, revision=revision, allow_patterns=patterns, local_files_only=cached
        )
        return Path(folder) / (path or "")

    try:
        copy = snapshot(cached=True)
        if not files:  # whether all are there is known from the listing alone
            get_cached_repo_tree(repository, repo_type=kind, revision=revision)
        if all(any(copy.glob(each)) for each in files) and copy.exists():
            return copy
    except (LocalEntryNotFoundError, CachedRepoTreeNotFoundError, ValueError):
        pass
    log(f"looking for {address} on the Hugging Face hub …")
    try:
        with limited_waits():
            copy = snapshot(cached=False)
        # Without an answer from the hub, the library returns what the cache has.
        get_cached_repo_tree(repository, repo_type=kind, revision=revision)
    except Exception as error:  # noqa: BLE001  # the library and its client have errors of their own
        # A data set's address without datasets/ is a likely mistake, but not among a model's files.
        hint = f"; a data set's address is hf://datasets/{repository}" if not (match[1] or files) else ""
        options = " --repo-type dataset" * (kind == "dataset") + (f" --revision {revision}" if revision else "")
        reason = _failure_reason(error, hint, f"hf download {repository}{options}")
        raise StorageError(f"cannot read {address} ({reason}); the cache is {constants.HF_HUB_CACHE}.") from None
    if not copy.exists():
        raise StorageError(f"{address}: the repository has no '{path}'; check the path.")
    return copy


def _failure_reason(error: Exception, hint: str, download: str) -> str:
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError, RepositoryNotFoundError

    if isinstance(error, RepositoryNotFoundError):
        return (
            "there is none of this name, or it is private or gated, and HF_TOKEN in the environment does not allow "
            f"it{hint}"
        )
    if isinstance(error, StorageError | LocalEntryNotFoundError | CachedRepoTreeNotFoundError):
        what = error if isinstance(error, StorageError) else "the hub cannot be reached"
        return (
            f"{what}, and the cache has no complete copy: run '{download}' when the hub "
            "answers, set HF_ENDPOINT to another hub, or give a local folder"
        )
    return describe(error)[:300]


def _what_happened(error: BaseException | None) -> str:
    """Describe how a server failed that was reached; empty if it was not."""
    while error is not None:
        kind = type(error).__name__
        if kind in ("URLError", "ConnectTimeout"):
            return ""
        if kind in ("ReadTimeout", "WriteTimeout", "TimeoutError"):
            return "the server accepted the connection, but then sent nothing for several seconds"
        if kind in ("JSONDecodeError", "FileMetadataError"):
            return "the answer is not a hub's, but perhaps the login page of a network or a proxy"
        if kind in ("RemoteProtocolError", "ReadError", "TooManyRedirects") or "Consistency check failed" in str(error):
            return f"the server's answer cannot be used ({error})"
        status = getattr(getattr(error, "response", None), "status_code", 0)
        if status == 429 or status >= 500:
            return f"the server answered {status} ({error.response.reason_phrase})"  # type: ignore[attr-defined]
        error = error.__cause__ or error.__context__
    return ""


@contextmanager
def limited_waits() -> Iterator[None]:
    """Limit how long libraries wait for a server while they download; by default they wait for ever.

    Raises:
        StorageError: Instead of a library's error about a server that answers wrongly or not at all.
    """
    with suppress(ImportError):
        from huggingface_hub import constants, get_session, set_client_factory

        if get_session().timeout.read is None:  # not a client of the user's
            set_client_factory(_client)
        if "HF_HUB_DOWNLOAD_TIMEOUT" not in os.environ:
            constants.HF_HUB_DOWNLOAD_TIMEOUT = _RESUMED_WAIT_SECONDS
    of_sockets = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_WAIT_SECONDS)  # for torch.hub
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        if what := _what_happened(error):
            raise StorageError(what) from error
        raise
    finally:
        socket.setdefaulttimeout(of_sockets)


def _client() -> Any:
    from huggingface_hub.utils._http import default_client_factory

    client: Any = default_client_factory()
    client.timeout = _WAIT_SECONDS
    client.send = partial(_send_patiently, client.send)
    client.event_hooks = {"request": [*client.event_hooks["request"], _limit_wait], "response": [_check_patience]}
    return client


def _send_patiently(send: Callable[..., Any], request: Any, **options: Any) -> Any:
    """Send a request, and again after the pauses that a busy server asks for: the library repeats only downloads."""
    for tries in itertools.count(1):
        response = send(request, **options)
        seconds = response.headers.get("Retry-After", "")
        is_busy = response.status_code in (429, 503) and seconds.isdigit() and request.method in ("GET", "HEAD")
        if not is_busy or tries == _MOST_TRIES:
            break
        response.close()
        time.sleep(int(seconds))
    return response


def _limit_wait(request: Any) -> None:
    """Limit a request's timeouts: the library gives some requests none, and others a minute."""
    longest = _WAIT_SECONDS if request.method in ("GET", "HEAD") else _COMMIT_SECONDS
    timeouts = request.extensions["timeout"]
    request.extensions["timeout"] = {kind: min(value or longest, longest) for kind, value in timeouts.items()}


def _check_patience(response: Any) -> None:
    """Raise for an answer with a long Retry-After, which the library would obey for hours."""
    status, seconds = response.status_code, response.headers.get("Retry-After", "")
    if status in (429, 503) and seconds.isdigit() and int(seconds) > _MOST_PATIENCE_SECONDS:
        raise StorageError(f"the server answered {status} and asks to wait {seconds} s (Retry-After)")


def check_token() -> str:
    """Return the environment's token for the hub.

    Raises:
        StorageError: If there is none.
    """
    token = os.environ.get("HF_TOKEN")
    if not token:
        raise StorageError(
            "an upload to the Hugging Face hub needs a token that may write, in the environment variable HF_TOKEN."
        )
    return token


def upload(folder: Path, repository: str) -> str:
    """Upload a folder in one commit to a model repository, created as a private one if missing; return its address.

    Raises:
        StorageError: If the hub refuses it or cannot be reached.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=check_token(), library_name="paceline")
    try:
        with limited_waits():
            created = api.create_repo(repository, private=True, exist_ok=True)
            api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload weights with Paceline")
    except Exception as error:  # noqa: BLE001  # the library and its client have errors of their own
        reason = error if isinstance(error, StorageError) else describe(error)[:300]
        raise StorageError(f"cannot upload to {repository}: {reason}.") from None
    return str(created)
