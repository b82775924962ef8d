"""How does a host get back what another one has copied to an address, whole or not at all?

The records come first and the checkpoint that vouches for them last: killed in between, the run goes on from an older
checkpoint, to which records are cut back, or from the beginning of the fetching.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from paceline.checkpoint.durable import hash_file, reporting_disk_errors
from paceline.checkpoint.mirror import Commit, Piece, in_line
from paceline.checkpoint.store import CheckpointStore, verify
from paceline.errors import CheckpointError, StorageError, UnreadableError
from paceline.records.run_directory import sync_directory
from paceline.storage.remote import Remote
from paceline.units import format_bytes

# What tells whose run it is, and is small.
_TELLING = ("recipe.yaml", "plan.json", "environment.json")


def fetch_newest(
    remote: Remote,
    commits: Iterable[Commit],
    root: Path,
    *,
    beyond: int,
    say: Callable[[str], None],
    accept: Callable[[Path], None] | None = None,
) -> Commit | None:
    """Copy the newest checkpoint that is whole at the address into a run directory, with the best one and the records.

    Args:
        remote: Where it lies.
        commits: What is there.
        root: The run directory, whose records are replaced.
        beyond: Only a checkpoint of a later step is taken; -1 for any.
        say: Takes lines about what goes on.
        accept: Raises if the run whose recipe, plan and environment lie in a folder is not the one that is wanted;
            called before anything is written here.

    Returns:
        What was fetched; None if there is none beyond.

    Raises:
        StorageError: If the address cannot be read, or all that lies there is damaged.
        CheckpointError: If this disk refuses.
    """
    damaged: list[str] = []
    line = in_line(commits)
    for commit in line:
        if commit.step <= beyond:
            break
        size = sum(each.size_bytes for each in commit.files.values())
        try:
            if accept is not None:
                _ask(remote, commit, accept)
            say(f"fetching the checkpoint of step {commit.step} ({format_bytes(size)}) from {remote.address}")
            _fetch(remote, commit, line, root)
        except _DamagedError as error:
            damaged.append(str(error))
            say(f"the copy of step {commit.step} is damaged: {error}")
        else:
            return commit
    if damaged and beyond < 0:
        raise StorageError(f"no checkpoint at {remote.address} is whole: {damaged[0]} Begin again at another address.")
    return None


class _DamagedError(Exception):
    """An object is not what its commit says."""


def _ask(remote: Remote, commit: Commit, accept: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        for name in _TELLING:
            if name in commit.records:
                _record(remote, commit.records[name], Path(folder) / name)
        accept(Path(folder))


def _fetch(remote: Remote, commit: Commit, commits: Sequence[Commit], root: Path) -> None:
    store = CheckpointStore(root / "checkpoints")
    for path in (*(root / "ledger").glob("rank-*.ids"), root / "run.json"):
        if str(path.relative_to(root)) not in commit.records:
            path.unlink(missing_ok=True)
    # The recipe makes a run of a directory.
    for name in sorted(commit.records, key=lambda each: each == "recipe.yaml"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        _record(remote, commit.records[name], root / name)
    best = _best(remote, commit, commits, store)
    _checkpoint(remote, commit, store)
    if commit.best is not None and (best or commit.best.step == commit.step):
        store.write_best(commit.best.step, commit.best.metric, commit.best.value, weights=commit.best.weights)


def _record(remote: Remote, pieces: Iterable[Piece], target: Path) -> None:
    """Write a record's pieces one after another, and give it its name when all are there."""
    partial = target.with_name(f".{target.name}.fetched")
    try:
        with reporting_disk_errors("fetch a record to", target):
            with partial.open("wb") as file:
                for piece in pieces:
                    file.write(_content(remote, piece))
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
            sync_directory(target.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _best(remote: Remote, commit: Commit, commits: Sequence[Commit], store: CheckpointStore) -> bool:
    """Fetch the best checkpoint too; without it the run goes on, and its next best one is kept."""
    if commit.best is None or commit.best.step == commit.step:
        return False
    if commit.best.step in store.steps():
        return True
    of_best = next((each for each in commits if each.step == commit.best.step), None)
    if of_best is None:
        return False
    try:
        _checkpoint(remote, of_best, store)
    except _DamagedError:
        return False
    return True


def _checkpoint(remote: Remote, commit: Commit, store: CheckpointStore) -> None:
    """Download a checkpoint into a hidden directory, hold it against the commit, and give it its name."""
    room = store.make_room(commit.step)
    try:
        with reporting_disk_errors(f"fetch the checkpoint of step {commit.step} to", room):
            for name, piece in commit.files.items():
                target = room / name
                target.parent.mkdir(exist_ok=True)
                _download(remote, piece, target)
        try:
            verify(room)
        except UnreadableError:
            raise
        except CheckpointError as error:
            raise _DamagedError(str(error)) from None
        store.adopt(room, commit.step)
    except BaseException:
        shutil.rmtree(room, ignore_errors=True)
        raise


def _download(remote: Remote, piece: Piece, target: Path) -> None:
    _must_be_there(remote, piece)
    remote.download(piece.name, target, piece.size_bytes)
    found = hash_file(target)
    if (found.size_bytes, found.sha256) != (piece.size_bytes, piece.sha256):
        raise _DamagedError(f"{remote.path(piece.name)} is not what was sent: another size or SHA-256.")
    with target.open("rb") as file:
        os.fsync(file.fileno())


def _content(remote: Remote, piece: Piece) -> bytes:
    _must_be_there(remote, piece)
    content = remote.read(piece.name)
    if len(content) != piece.size_bytes or hashlib.sha256(content).hexdigest() != piece.sha256:
        raise _DamagedError(f"{remote.path(piece.name)} is not what was sent: another size or SHA-256.")
    return content


def _must_be_there(remote: Remote, piece: Piece) -> None:
    found = remote.size_of(piece.name)
    if found is None:
        raise _DamagedError(f"{remote.path(piece.name)} is missing.")
    if found != piece.size_bytes:
        raise _DamagedError(f"{remote.path(piece.name)} has {found} bytes instead of {piece.size_bytes}.")
