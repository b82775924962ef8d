"""Repositories of the Hugging Face hub: copies in its library's own cache, and uploads.

A copy is looked for in the cache first, and there a run keeps working without a network.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection
from pathlib import Path

from paceline.errors import StorageError
from paceline.storage.addresses import Address, parse_address
from paceline.storage.remote import describe

_FORM = re.compile(r"(datasets/)?([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.+))?")
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
    if isinstance(error, LocalEntryNotFoundError | CachedRepoTreeNotFoundError):
        return (
            f"the hub cannot be reached, and the cache has no complete copy: connect and run '{download}', set "
            "HF_ENDPOINT to another hub, or give a local folder"
        )
    return describe(error)[:300]


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
        created = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload weights with Paceline")
    except Exception as error:  # noqa: BLE001  # the library and its client have errors of their own
        raise StorageError(f"cannot upload to {repository}: {describe(error)[:300]}.") from None
    return str(created)
