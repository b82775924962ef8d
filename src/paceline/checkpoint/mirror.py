"""The copy of a run at an address, from which another host can resume it.

    checkpoints/step-00000120-3f2a…/…   the files of a checkpoint, named by its manifest's digest, never changed
    records/…                           the growth of the run's records since the last copy
    commits/00000012-9c1b….json         names all of these, with sizes and digests; written last

An object store has no rename, so a checkpoint exists once its commit does: one small object, which is written
atomically. An object that is not in any commit is an interrupted upload; it is never read, and the next pruning deletes
it.

When a copy is fetched, the records come first and the checkpoint that vouches for them last: after a kill in between,
the run resumes from an older checkpoint, to which records are cut back, or the download starts again.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from paceline.checkpoint.durable import FileFacts, hash_file, is_disk_failure, reporting_disk_errors
from paceline.checkpoint.manifest import MANIFEST, check_stamp, read_manifest, verify
from paceline.checkpoint.publish import LocalCheckpoint
from paceline.checkpoint.store import Best, CheckpointStore
from paceline.errors import CheckpointError, StorageError, UnreadableError, VersionError
from paceline.parsing.plain_text import load_json
from paceline.parsing.units import format_bytes
from paceline.records.run_directory import sync_directory
from paceline.storage.remote import Remote, run_concurrently

_VERSION = 2
_COMMIT = re.compile(r"commits/(\d{8,})-[0-9a-f]{8}\.json")
# Concurrent uploads: a library may hold some 100 MiB of each file.
_MAX_UPLOADS = 4
_PIECE_BYTES = 64 * 2**20
# If a record has more small pieces than this, they are sent again as one, so that a long run's copy does not accumulate
# them.
_MAX_SMALL_PIECES = 32
# Small files that identify the run.
_IDENTIFYING = ("recipe.yaml", "plan.json", "environment.json")
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")


@dataclass(frozen=True)
class Piece:
    """One object at the address.

    Attributes:
        name: Relative to the address.
        facts: Its size and digest.
    """

    name: str
    facts: FileFacts

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Piece:
        """Read :meth:`to_json`'s result."""
        return cls(value["name"], FileFacts.from_json(value))

    def to_json(self) -> dict[str, Any]:
        """Return name, size and digest."""
        return {"name": self.name, **self.facts.to_json()}


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A checkpoint at the address, and the records that belong to it.

    Attributes:
        sequence: Commits of a run are numbered; the highest is the newest, even after a run resumed from an earlier
            step.
        run: The identity under which the run is copied.
        step: Step of the checkpoint.
        files: The checkpoint's files by their names in it.
        records: Files of the run directory by their names in it, each in pieces.
        best: What ``best.json`` said.
        name: Name of the commit object, relative to the address.
    """

    sequence: int
    run: str
    step: int
    files: Mapping[str, Piece]
    records: Mapping[str, tuple[Piece, ...]]
    best: Best | None = None
    name: str = ""

    @property
    def pieces(self) -> set[str]:
        """Names of all objects that the commit needs."""
        return {each.name for each in self.files.values()} | {
            each.name for pieces in self.records.values() for each in pieces
        }


@dataclass(frozen=True)
class CommitListing:
    """The commits at an address.

    Attributes:
        commits: Complete commits, newest first.
        damaged: Messages about incomplete ones.
        names: Names of all of their objects.
    """

    commits: tuple[Commit, ...] = ()
    damaged: tuple[str, ...] = ()
    names: frozenset[str] = field(default_factory=frozenset)


class Mirror:
    """The copy of one run at an address; one thread of one process writes it.

    It deletes objects only after its first upload, and never after another launch has written there.

    Args:
        remote: The address.
        run: The identity under which the run is copied.
        listing: The result of :func:`list_commits`.
    """

    def __init__(self, remote: Remote, run: str, listing: CommitListing) -> None:
        self._remote, self._run = remote, run
        self._commits = {each.name: each for each in listing.commits}
        self._initial_names = listing.names
        self._launch = secrets.token_hex(4)
        self._max_sent: dict[str, int] = {}
        self._last_progress_at = float("-inf")
        # What this launch has sent of each record; data that earlier ones sent may have been cut back since.
        self._sent: dict[str, list[Piece]] = {}

    @property
    def last_progress_at(self) -> float:
        """Time of the last upload progress, by :func:`time.monotonic`."""
        return self._last_progress_at

    def send(self, checkpoint: LocalCheckpoint, root: Path) -> None:
        """Copy a checkpoint and its records to the address; on return, the newest commit names them.

        Args:
            checkpoint: The checkpoint.
            root: The run directory.

        Raises:
            CheckpointError: If the checkpoint is gone.
            UnreadableError: If it, or a record, cannot be read now.
            StorageError: If the address reports an error, or another launch writes there.
        """
        newest = next(iter(commit_chain(self._commits.values())), None)
        if newest is not None and newest.files[MANIFEST].facts == FileFacts.of(_manifest_bytes(checkpoint.path)):
            return
        files = self._send_files(checkpoint)
        records = {name: self._send_growing(root / name, name, size) for name, size in checkpoint.growing.items()}
        records |= {name: (self._send_small(root / name, name),) for name in checkpoint.small}
        self._commit(checkpoint, files, records)

    def _send_files(self, checkpoint: LocalCheckpoint) -> dict[str, Piece]:
        before = _manifest_bytes(checkpoint.path)
        manifest = read_manifest(checkpoint.path)
        manifest_facts = FileFacts.of(before)
        folder = f"checkpoints/step-{checkpoint.step:08d}-{manifest_facts.digest[:12]}"
        files = {
            name: Piece(f"{folder}/{name}", facts)
            for entry in manifest.components.values()
            for name, facts in entry.files.items()
        }
        uploaded = self._remote.list_files(folder)
        # Continue an interrupted upload.
        missing = {
            name: piece
            for name, piece in files.items()
            if piece.name not in uploaded or uploaded[piece.name].size_bytes != piece.facts.size_bytes
        }
        run_concurrently(
            lambda name: self._upload(checkpoint.path / name, missing[name]),
            missing,
            threads=_MAX_UPLOADS,
            name="mirror-upload",
        )
        files[MANIFEST] = Piece(f"{folder}/{MANIFEST}", manifest_facts)
        self._remote.write(f"{folder}/{MANIFEST}", before)
        if _manifest_bytes(checkpoint.path) != before:
            # Checkpoint directories are replaced as a whole: if the manifest is unchanged, so is everything before it.
            raise CheckpointError(f"{checkpoint.path} was replaced while it was copied.")
        uploaded = self._remote.list_files(folder)
        for piece in files.values():
            if piece.name not in uploaded or uploaded[piece.name].size_bytes != piece.facts.size_bytes:
                raise StorageError(f"{self._remote.path(piece.name)} does not have the size that was uploaded.")
        return files

    def _upload(self, source: Path, piece: Piece) -> None:
        if not source.is_file():
            raise CheckpointError(f"{source} was deleted before it was copied.")
        if hash_file(source) != piece.facts:
            raise CheckpointError(f"{source} has changed since it was saved, and was not copied; check the disk.")
        self._remote.upload(source, piece.name, lambda sent: self._record_progress(piece.name, sent))

    def _record_progress(self, name: str, sent: int) -> None:
        # Resending data that was sent before and lost does not count as progress.
        if sent > self._max_sent.get(name, 0):
            self._max_sent[name], self._last_progress_at = sent, time.monotonic()

    def _send_growing(self, source: Path, name: str, size: int) -> tuple[Piece, ...]:
        """Return the pieces of a record's first ``size`` bytes; data that is new since the last call is sent."""
        sent = self._sent.get(name, [])
        if sum(each.facts.size_bytes for each in sent) > size:
            sent = []
        elif sum(each.facts.size_bytes < _PIECE_BYTES for each in sent) > _MAX_SMALL_PIECES:
            # The full pieces at the start of a long record are never sent again.
            sent = list(itertools.takewhile(lambda each: each.facts.size_bytes == _PIECE_BYTES, sent))
        sent, offset = list(sent), sum(each.facts.size_bytes for each in sent)
        with _open_for_reading(source) as file:
            file.seek(offset)
            while offset < size:
                content = file.read(min(_PIECE_BYTES, size - offset))
                if not content:
                    raise CheckpointError(f"{source} has become shorter than the {size} bytes that were recorded.")
                sent.append(self._write(f"records/{self._launch}/{name}/{size:012d}-{offset:012d}", content))
                offset += len(content)
        self._sent[name] = sent
        return tuple(sent)

    def _send_small(self, source: Path, name: str) -> Piece:
        with _open_for_reading(source) as file:
            content = file.read()
        facts, known = FileFacts.of(content), self._sent.get(name)
        if known is None or known[0].facts != facts:
            self._sent[name] = [self._write(f"records/{self._launch}/{name}/{facts.digest[:12]}", content)]
        return self._sent[name][0]

    def _write(self, name: str, content: bytes) -> Piece:
        self._remote.write(name, content)
        return Piece(name, FileFacts.of(content))

    def _commit(
        self, checkpoint: LocalCheckpoint, files: Mapping[str, Piece], records: Mapping[str, tuple[Piece, ...]]
    ) -> None:
        # A commit of this launch may have been stored although no response arrived.
        sequence = max((number for number, _ in self._commit_names()), default=0) + 1
        name = f"commits/{sequence:08d}-{self._launch}.json"
        commit = Commit(
            sequence=sequence,
            run=self._run,
            step=checkpoint.step,
            files=files,
            records=records,
            best=checkpoint.best,
            name=name,
        )
        self._remote.write(name, _to_bytes(commit))
        self._commits[name] = commit

    def _commit_names(self) -> list[tuple[int, str]]:
        """Return the numbers and names of the commits that are there now.

        Raises:
            MirrorConflictError: If another launch has written one.
        """
        commits = _commit_names(self._remote)
        if any(name not in self._initial_names and not name.endswith(f"-{self._launch}.json") for _, name in commits):
            raise MirrorConflictError(
                f"another launch has written to {self._remote.address} since this one started; this one uploads "
                "nothing more."
            )
        return commits

    def prune(self, *, keep: int) -> None:
        """Delete all but the newest commits of ``keep`` steps and the best step, and all unreferenced objects.

        If the run resumed from an earlier step, the abandoned commits are deleted too: its newest commit does not build
        on them.

        Raises:
            StorageError: If the address fails, or has lost uploads; the next call continues.
            MirrorConflictError: If another launch has written there; nothing is deleted then.
        """
        commits = self._commit_names()
        retained = select_retained(self._commits.values(), keep)
        if not retained:
            return
        present = [*self._remote.list_files("checkpoints"), *self._remote.list_files("records")]
        # The commits that stay must exist: a launch that started later may have deleted their objects as leftovers.
        newest = commit_chain(retained.values())[0]
        if missing := newest.pieces.difference(present):
            del self._commits[newest.name]  # so that the next attempt sends it again
            self._sent.clear()
            raise StorageError(f"{self._remote.path(min(missing))} is missing, but a commit lists it.")
        # Delete names first: a partly deleted checkpoint must not be chosen.
        self._remote.delete([name for _, name in commits if name not in retained])
        self._commits = dict(retained)
        needed: set[str] = set().union(*(each.pieces for each in retained.values()))
        # The next commit builds on the records that this launch has sent.
        needed |= {piece.name for pieces in self._sent.values() for piece in pieces}
        self._remote.delete([name for name in present if name not in needed])


class MirrorConflictError(StorageError):
    """Another launch writes to the same address; a permanent error."""


def commit_chain(commits: Iterable[Commit]) -> list[Commit]:
    """Return the commits that the newest builds on, newest first, without those that the run has abandoned."""
    chain: list[Commit] = []
    for each in sorted(commits, key=lambda each: (each.sequence, each.step, each.name), reverse=True):
        if not chain or each.step <= chain[-1].step:
            chain.append(each)
    return chain


def select_retained(commits: Iterable[Commit], keep: int) -> dict[str, Commit]:
    """Return the newest commit of each of the last ``keep`` steps, and of the best step, by name."""
    chain = commit_chain(commits)
    by_step: dict[int, Commit] = {}
    for each in chain:
        by_step.setdefault(each.step, each)
    best = chain[0].best if chain else None
    retained = [*list(by_step.values())[:keep], *([by_step[best.step]] if best and best.step in by_step else [])]
    return {each.name: each for each in retained}


def list_commits(remote: Remote) -> CommitListing:
    """Read the commits at an address.

    Raises:
        StorageError: If the address cannot be read.
        VersionError: If another version of Paceline wrote one.
    """
    commits, damaged = [], []
    names = sorted(_commit_names(remote), reverse=True)
    for number, name in names:
        try:
            commit = _from_bytes(remote.read(name), name)
            if commit.sequence != number:
                raise ValueError(f"its content says it is number {commit.sequence}")
            commits.append(commit)
        except (ValueError, KeyError, TypeError) as error:
            damaged.append(f"{remote.path(name)} is not a valid commit: {error}")
    return CommitListing(tuple(commits), tuple(damaged), frozenset(name for _, name in names))


def _commit_names(remote: Remote) -> list[tuple[int, str]]:
    matches = ((_COMMIT.fullmatch(name), name) for name in remote.list_files("commits"))
    return [(int(match[1]), name) for match, name in matches if match]


def _to_bytes(commit: Commit) -> bytes:
    content = {
        "format_version": _VERSION,
        "sequence": commit.sequence,
        "run": commit.run,
        "step": commit.step,
        "files": {name: piece.to_json() for name, piece in commit.files.items()},
        "records": {name: [each.to_json() for each in pieces] for name, pieces in commit.records.items()},
        "best": None if commit.best is None else asdict(commit.best),
    }
    return json.dumps({**content, "digest": _digest(content)}, indent=1).encode("utf-8")


def _from_bytes(text: bytes, commit_name: str) -> Commit:
    content = load_json(text)
    check_stamp(content, f"checkpoint.mirror/{commit_name}", _VERSION, _digest)
    del content["format_version"]
    files = {name: Piece.from_json(piece) for name, piece in content.pop("files").items()}
    records = {name: tuple(Piece.from_json(each) for each in pieces) for name, pieces in content.pop("records").items()}
    for name in (*files, *records, *(each.name for each in files.values())):
        if not _SAFE_NAME.fullmatch(name) or ".." in name:
            raise ValueError(f"it names the file {name!r}, which is not allowed")
    best = content.pop("best")
    return Commit(
        files=files, records=records, best=None if best is None else Best(**best), name=commit_name, **content
    )


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode("utf-8")).hexdigest()


def _manifest_bytes(checkpoint: Path) -> bytes:
    with _open_for_reading(checkpoint / MANIFEST) as file:
        return file.read()


def _open_for_reading(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        kind = UnreadableError if is_disk_failure(error) else CheckpointError
        raise kind(f"cannot read {path} to copy it: {error.strerror or error}.") from error


def fetch_newest(
    remote: Remote,
    commits: Iterable[Commit],
    root: Path,
    *,
    after_step: int,
    log: Callable[[str], None],
    accept: Callable[[Path], None] | None = None,
) -> Commit | None:
    """Copy the newest complete checkpoint at the address into a run directory, with the best one and the records.

    Args:
        remote: The address.
        commits: The commits at the address.
        root: The run directory, whose records are replaced.
        after_step: Use only a checkpoint of a later step; -1 for any.
        log: Receives progress lines.
        accept: Raises if the run whose recipe, plan and environment are in a folder is not the right one; called before
            anything is written locally.

    Returns:
        The commit that was fetched; None if none is beyond that step.

    Raises:
        StorageError: If the address cannot be read, or everything there is damaged.
        CheckpointError: If the local disk fails.
    """
    damaged: list[str] = []
    chain = commit_chain(commits)
    for commit in chain:
        if commit.step <= after_step:
            break
        size = sum(each.facts.size_bytes for each in commit.files.values())
        try:
            if accept is not None:
                with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
                    for name in set(_IDENTIFYING) & commit.records.keys():
                        _fetch_record(remote, commit.records[name], Path(folder) / name)
                    _check_version(remote, commit, Path(folder) / MANIFEST)
                    accept(Path(folder))
            log(f"fetching the checkpoint of step {commit.step} ({format_bytes(size)}) from {remote.address}")
            _fetch(remote, commit, chain, root)
        except _DamagedObjectError as error:
            damaged.append(str(error))
            log(f"the copy of step {commit.step} is damaged: {error}")
        else:
            return commit
    if damaged and after_step < 0:
        raise StorageError(
            f"no checkpoint at {remote.address} is whole: {damaged[0]} Start again with another address."
        )
    return None


def _check_version(remote: Remote, commit: Commit, target: Path) -> None:
    """Refuse a checkpoint of another version of Paceline; damage is found where it is copied."""
    if (manifest := commit.files.get(MANIFEST)) is None:
        return
    _fetch_record(remote, [manifest], target)
    try:
        read_manifest(target.parent)
    except VersionError as error:
        raise VersionError.of(remote.path(manifest.name), error.value) from None
    except CheckpointError as error:
        raise _DamagedObjectError(f"{remote.path(manifest.name)}: {error}") from None


class _DamagedObjectError(Exception):
    """An object differs from its commit's description."""


def _fetch(remote: Remote, commit: Commit, commits: Sequence[Commit], root: Path) -> None:
    store = CheckpointStore(root / "checkpoints")
    for path in (*(root / "ledger").glob("rank-*.ids"), root / "run.json"):
        if str(path.relative_to(root)) not in commit.records:
            path.unlink(missing_ok=True)
    # The recipe last: a directory with one counts as a run.
    for name in sorted(commit.records, key=lambda each: each == "recipe.yaml"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        _fetch_record(remote, commit.records[name], root / name)
    best = commit.best
    has_best = best is not None and (best.step == commit.step or best.step in store.steps())
    best_commit = next((each for each in commits if best is not None and each.step == best.step), None)
    if best_commit is not None and not has_best:
        # A run resumes without its best checkpoint too, and saves the next best one.
        with contextlib.suppress(_DamagedObjectError):
            _fetch_checkpoint(remote, best_commit, store)
            has_best = True
    _fetch_checkpoint(remote, commit, store)
    if best is not None and has_best:
        store.write_best(best)


def _fetch_record(remote: Remote, pieces: Iterable[Piece], target: Path) -> None:
    """Write a record's pieces one after another, and rename the file once it is complete."""
    partial = target.with_name(f".{target.name}.fetched")
    try:
        with reporting_disk_errors("fetch a record to", target):
            with partial.open("wb") as file:
                for piece in pieces:
                    _check_size(remote, piece)
                    content = remote.read(piece.name)
                    _check_content(remote, piece, FileFacts.of(content))
                    file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
            sync_directory(target.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _fetch_checkpoint(remote: Remote, commit: Commit, store: CheckpointStore) -> None:
    """Download a checkpoint into a staging directory, verify it, and rename it into place."""
    staging_dir = store.make_staging_dir(commit.step)
    try:
        with reporting_disk_errors(f"fetch the checkpoint of step {commit.step} to", staging_dir):
            for name, piece in commit.files.items():
                target = staging_dir / name
                target.parent.mkdir(exist_ok=True)
                _check_size(remote, piece)
                remote.download(piece.name, target, piece.facts.size_bytes)
                _check_content(remote, piece, hash_file(target))
                with target.open("rb") as file:
                    os.fsync(file.fileno())
        try:
            verify(staging_dir)
        except UnreadableError:
            raise
        except CheckpointError as error:
            raise _DamagedObjectError(str(error)) from None
        store.adopt(staging_dir, commit.step)
    except BaseException:
        shutil.rmtree(staging_dir, ignore_errors=True)
        raise


def _check_size(remote: Remote, piece: Piece) -> None:
    stored = remote.stat_file(piece.name)
    if stored is None:
        raise _DamagedObjectError(f"{remote.path(piece.name)} is missing.")
    if stored.size_bytes != (expected := piece.facts.size_bytes):
        raise _DamagedObjectError(f"{remote.path(piece.name)} has {stored.size_bytes} bytes instead of {expected}.")


def _check_content(remote: Remote, piece: Piece, found: FileFacts) -> None:
    if found != piece.facts:
        raise _DamagedObjectError(f"{remote.path(piece.name)} is not what was uploaded: its size or digest differs.")
