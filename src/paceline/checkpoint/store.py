"""The checkpoints of a run; at least one is always complete.

A checkpoint is written under a hidden name, flushed, and renamed into place: under its own name it is complete or
absent. Older ones are removed only after the new one is durable, and are renamed before they are deleted.

Each component has a file ``NAME.json`` (structure and plain values) and, if it has tensors, ``NAME.safetensors``, or a
folder ``NAME`` if its tensors are sharded; the manifest, which lists them all, is written last.

Several processes, each with a part of the tensors, write one checkpoint together without a collective: each writes its
files into the staging directory created by the first, and then a note that lists them. The first waits for the notes;
only it writes the manifest and renames the directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from paceline.checkpoint.durable import (
    FileFacts,
    read_regular_file,
    reporting_disk_errors,
    size_of,
    with_retries,
    write_file,
)
from paceline.checkpoint.format import (
    Part,
    TensorSpec,
    decode,
    encode,
    inventory,
    write_parts,
    write_tensor_file,
)
from paceline.checkpoint.manifest import (
    MANIFEST,
    ComponentEntry,
    Manifest,
    check_component_names,
    check_sizes,
    verify,
)
from paceline.checkpoint.state import State
from paceline.errors import CheckpointError, UnreadableError
from paceline.parsing.files import free_name
from paceline.parsing.plain_text import load_json
from paceline.records.run_directory import sync_directory

T = TypeVar("T")

BEST_FILE_NAME = "best.json"
_REPLACED = ".replaced"
_NAME = re.compile(r"step-(\d{8,})(\.replaced)?")
_LEFTOVER = re.compile(r"\.(saving|deleting)-step-\d{8,}-[0-9a-f]{8}")
_BEST_LEFTOVER = ".saving-best-"
_POLL_SECONDS = 0.05

Files = dict[str, dict[str, FileFacts]]
"""Files with their facts, by component."""


@dataclass(frozen=True)
class DamagedCheckpoint:
    """A directory with a checkpoint's name that does not verify, and the reason."""

    path: Path
    step: int
    reason: str


@dataclass(frozen=True)
class Best:
    """The best step so far, and its measurement.

    Attributes:
        step: Step of the checkpoint.
        metric: Name of the deciding metric.
        value: Its value, in the metric's own unit.
        weights: The weights it was measured with, ``model`` or ``ema``.
    """

    step: int
    metric: str
    value: float
    weights: str = "model"


@dataclass(frozen=True)
class CheckpointPayload:
    """The content of one checkpoint, in its stored form.

    Attributes:
        step: Optimizer steps done.
        facts: Facts for the manifest.
        components: Structure and tensors by component name.
        header: Metadata of each safetensors file.
    """

    step: int
    facts: Mapping[str, Any]
    components: Mapping[str, tuple[Any, dict[str, Tensor | Part]]]
    header: Mapping[str, str]

    @classmethod
    def of(
        cls, step: int, components: Mapping[str, State], facts: Mapping[str, Any], file_metadata: Mapping[str, str]
    ) -> CheckpointPayload:
        """Encode all components, so that unsupported values are found before anything is written.

        Raises:
            CheckpointError: Naming the component, or the path of the object, that cannot be saved.
        """
        check_component_names(components)
        if inventory(dict(facts), where="facts"):
            raise CheckpointError("the facts of a checkpoint hold a tensor; put it into a component.")
        encoded = {name: encode(dict(state), where=name) for name, state in components.items()}
        strings = {
            key: value if isinstance(value, str) else json.dumps(encode(value)[0]) for key, value in facts.items()
        }
        return cls(step, facts, encoded, {**strings, **file_metadata, "step": str(step), "format": "pt"})

    def write_files(self, directory: Path, *, rank: int) -> Files:
        """Write the files of one process: its parts and, on the first, everything else.

        Raises:
            OSError: If the disk fails.
        """
        written: Files = {}
        for name, (structure, tensors) in self.components.items():
            header = {**self.header, "component": name}
            files: dict[str, FileFacts] = {}
            unsharded = {key: each for key, each in tensors.items() if isinstance(each, Tensor)}
            if len(unsharded) < len(tensors):
                files = write_parts(directory, name, tensors, header, rank=rank)
            elif unsharded and rank == 0:
                files[f"{name}.safetensors"] = write_tensor_file(directory / f"{name}.safetensors", unsharded, header)
            if rank == 0:
                text = json.dumps(structure, allow_nan=False).encode("ascii")
                files[f"{name}.json"] = write_file(directory / f"{name}.json", [text])
            written[name] = files
        return written


@dataclass(frozen=True)
class ShardedSave:
    """One process's view of a save by several processes.

    Attributes:
        staging_dir: The hidden directory, which exists.
        rank: Rank of this process.
        world_size: Number of processes that write.
        patience_seconds: How long the first process waits while no other makes progress.
        cancelled: Set when the run has failed elsewhere: the notes may never come.
    """

    staging_dir: Path
    rank: int
    world_size: int
    patience_seconds: float
    cancelled: threading.Event = field(default_factory=threading.Event)

    def write_note(self, files: Files, *, error: str | None = None) -> None:
        """Report to the first process what this one has written, or why it failed.

        Raises:
            OSError: If the disk fails here too.
        """
        listed = {name: {file: facts.to_json() for file, facts in entry.items()} for name, entry in files.items()}
        note = self._note(self.rank)
        unfinished = note.with_suffix(".part")
        write_file(unfinished, [json.dumps({"error": error, "files": listed}).encode("ascii")])
        os.rename(unfinished, note)

    def gather_notes(self) -> Files:
        """Wait for the others' notes and remove them; return the files that all of them have written.

        Raises:
            CheckpointError: If a process could not write, or does not make progress.
        """
        files: Files = {}
        for rank in range(1, self.world_size):
            content = self._wait_for(rank)
            if content["error"] is not None:
                raise CheckpointError(f"rank {rank} could not write its part of the checkpoint: {content['error']}")
            for name, entry in content["files"].items():
                files.setdefault(name, {}).update({file: FileFacts.from_json(facts) for file, facts in entry.items()})
            self._note(rank).unlink()
        return files

    def _wait_for(self, rank: int) -> Mapping[str, Any]:
        note, size, since = self._note(rank), -1, time.monotonic()
        while not note.exists():
            if (now := size_of(self.staging_dir)) != size:
                size, since = now, time.monotonic()
            if self.cancelled.wait(_POLL_SECONDS):
                raise CheckpointError(
                    f"rank {rank} has not written its part of the checkpoint, and the run has failed."
                )
            if time.monotonic() - since > self.patience_seconds:
                raise CheckpointError(
                    f"rank {rank} has not written its part of the checkpoint in {self.staging_dir}, and nothing was "
                    f"written there for {self.patience_seconds:.0f} s; all hosts need to see the same run directory."
                )
        content: Mapping[str, Any] = load_json(note.read_bytes())
        return content

    def _note(self, rank: int) -> Path:
        return self.staging_dir / f"note-{rank:05d}.json"


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint directory's name, or None for any other name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match and checkpoint_name(int(match[1])) == f"step-{match[1]}" else None


class CheckpointStore:
    """The checkpoints of one run, ``RUN/checkpoints``; one process writes, any may read."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, step: int) -> Path:
        """Return the path of a step's checkpoint, whether or not it exists."""
        path = self.directory / checkpoint_name(step)
        replaced = _replaced_path(path)
        # After a kill between the two renames of a replacement, the old checkpoint is still under this name.
        return replaced if not os.path.lexists(path) and os.path.lexists(replaced) else path

    def save(
        self,
        step: int,
        components: Mapping[str, State],
        facts: Mapping[str, Any],
        *,
        replace: bool = False,
        file_metadata: Mapping[str, str] | None = None,
        sharded: ShardedSave | None = None,
    ) -> Path:
        """Write a checkpoint, and return its path; on return it survives a kill and a power cut.

        Args:
            step: Optimizer steps done.
            components: State by name; ``NAME.json`` and, if it has tensors, ``NAME.safetensors``.
            facts: JSON-able facts for the manifest; also written as strings into each safetensors header.
            replace: Replace an existing checkpoint of this step.
            file_metadata: Additional entries of each safetensors header, so that each file is self-describing.
            sharded: The other processes, if they hold parts of the state and write them with :meth:`write_shard`.

        Raises:
            CheckpointError: If it could not be written; existing checkpoints are untouched.
        """
        target = self.directory / checkpoint_name(step)
        payload = CheckpointPayload.of(step, components, facts, file_metadata or {})
        with reporting_disk_errors(f"write the checkpoint of step {step} at", target):
            if not replace and os.path.lexists(self.path(step)):
                raise CheckpointError(f"{self.path(step)} exists already; a checkpoint is replaced only on request.")
            temporary = self.make_staging_dir(step) if sharded is None else sharded.staging_dir
            try:
                written = payload.write_files(temporary, rank=0)
                for name, files in (sharded.gather_notes() if sharded else {}).items():
                    written[name] |= files
                entries = {
                    name: ComponentEntry(written[name], {key: TensorSpec.of(each) for key, each in tensors.items()})
                    for name, (_, tensors) in payload.components.items()
                }
                write_file(temporary / MANIFEST, [Manifest(step, facts, entries).to_bytes()])
                sync_directory(temporary)
                self._publish(temporary, target, replace=replace)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
        return target

    def write_shard(
        self,
        step: int,
        components: Mapping[str, State],
        facts: Mapping[str, Any],
        *,
        file_metadata: Mapping[str, str],
        sharded: ShardedSave,
    ) -> None:
        """Write the parts that this process holds and notify the first process; for all processes but the first.

        Raises:
            CheckpointError: If they could not be written; the first process's save fails too.
        """
        payload = CheckpointPayload.of(step, components, facts, file_metadata)
        with reporting_disk_errors(f"write a part of the checkpoint of step {step} at", sharded.staging_dir):
            try:
                written = payload.write_files(sharded.staging_dir, rank=sharded.rank)
            except OSError as error:
                sharded.write_note({}, error=error.strerror or str(error))
                raise
            sharded.write_note(written)

    def make_staging_dir(self, step: int) -> Path:
        """Create the hidden directory that several processes will write into.

        Raises:
            CheckpointError: If the disk fails.
        """
        with reporting_disk_errors(f"write the checkpoint of step {step} at", self.directory / checkpoint_name(step)):
            if not self.directory.is_dir():
                os.makedirs(self.directory, exist_ok=True)
                sync_directory(self.directory.parent)
            # Leftovers of a killed save or deletion. Removing them is best effort: a failure must not cost this save.
            for path in map(Path, self._entries()):
                replacing = path.with_suffix("")
                if _LEFTOVER.fullmatch(path.name):
                    with contextlib.suppress(OSError):
                        _remove(path)
                elif path.name.endswith(_REPLACED) and step_of(path) is not None and os.path.lexists(replacing):
                    self._delete_replaced(replacing)
            staging_dir = self._hidden("saving", step)
            os.mkdir(staging_dir)
            return staging_dir

    def adopt(self, staging_dir: Path, step: int) -> Path:
        """Rename a complete checkpoint that was copied into a staging directory to its final name.

        Args:
            staging_dir: The directory (:meth:`make_staging_dir`), verified and flushed to the disk.
            step: Its step; an existing checkpoint of this step is replaced.

        Raises:
            CheckpointError: If the disk fails.
        """
        target = self.directory / checkpoint_name(step)
        with reporting_disk_errors(f"put the checkpoint of step {step} at", target):
            sync_directory(staging_dir)
            self._publish(staging_dir, target, replace=True)
        return target

    def steps(self) -> list[int]:
        """Return the steps that have a directory or link with a checkpoint's name, ascending; none is verified."""
        with reporting_disk_errors("list the checkpoints in", self.directory):
            steps = {step_of(Path(entry)) for entry in self._entries() if entry.is_symlink() or entry.is_dir()}
        return sorted(step for step in steps if step is not None)

    def newest_complete(self, *, exclude: Collection[int] = ()) -> tuple[Path | None, list[DamagedCheckpoint]]:
        """Return the newest valid checkpoint, and the newer invalid ones, newest first.

        Args:
            exclude: Steps to ignore.

        Raises:
            UnreadableError: If this cannot be determined now.
        """

        def verified(path: Path) -> Path:
            manifest = verify(path)
            if manifest.step != step_of(path):
                raise CheckpointError(
                    f"{path} is not a whole checkpoint: {MANIFEST}: it was saved at step {manifest.step}."
                )
            return path

        return self.read_newest(verified, exclude=exclude)

    def read_newest(
        self, read: Callable[[Path], T], *, exclude: Collection[int] = ()
    ) -> tuple[T | None, list[DamagedCheckpoint]]:
        """Read the newest complete checkpoint, while another process may save, rename and prune.

        Args:
            read: Reads a checkpoint; raises a CheckpointError if it is damaged.
            exclude: Steps to ignore.

        Returns:
            The result of ``read``, or None if no checkpoint is complete; and the newer damaged ones, newest first.

        Raises:
            UnreadableError: If one that may be complete cannot be read now.
        """
        damaged: list[DamagedCheckpoint] = []
        for step in sorted(set(self.steps()).difference(exclude), reverse=True):
            try:
                return retry_if_replaced(partial(self.path, step), read), damaged
            except UnreadableError:
                raise
            except CheckpointError as error:
                if not os.path.lexists(path := self.path(step)):
                    # It was pruned meanwhile, after a newer one was saved.
                    return self.read_newest(read, exclude=exclude)
                damaged.append(DamagedCheckpoint(path, step, str(error)))
        return None, damaged

    def set_aside(self, damaged: DamagedCheckpoint, suffix: str = "damaged") -> Path:
        """Rename an unusable checkpoint to ``step-N.damaged``: it is kept, but no longer counts as a checkpoint.

        Raises:
            CheckpointError: If it is not in this store, or cannot be renamed.
        """
        if damaged.path.parent != self.directory or step_of(damaged.path) is None:
            raise CheckpointError(
                f"{damaged.path} is not a checkpoint in {self.directory}; nothing was renamed.", path=damaged.path
            )
        target = free_name(self.directory / f"{damaged.path.name.removesuffix(_REPLACED)}.{suffix}")
        with reporting_disk_errors("set aside the checkpoint", damaged.path):
            os.rename(damaged.path, target)
            sync_directory(self.directory)
        return target

    def prune(self, *, keep: int, protect: Collection[int] = ()) -> list[int]:
        """Delete all but the ``keep`` newest checkpoints and the steps in ``protect``; call this after a save.

        Only checkpoints with a valid manifest and files of the right size count as kept, so a torn one never displaces
        a complete one.

        Returns:
            The deleted steps, ascending.

        Raises:
            CheckpointError: If ``keep`` is below 1, or the disk fails.
        """
        if keep < 1:
            raise CheckpointError(f"found keep={keep}, but at least 1 checkpoint must be kept; give 1 or more.")
        present, complete = self.steps(), []
        for step in present:
            with contextlib.suppress(CheckpointError):
                check_sizes(self.path(step))
                complete.append(step)
        kept = complete[-keep:]
        old = [step for step in present if kept and step < kept[0] and step not in protect]
        self._delete(old)
        return old

    def discard_after(self, step: int) -> list[int]:
        """Delete the checkpoints of later steps, for a run that resumes from an earlier ``step``.

        Otherwise they would count as the newest: they would displace the new ones, and the run would resume from them.

        Returns:
            The deleted steps, ascending.

        Raises:
            CheckpointError: If the disk fails.
        """
        later = [present for present in self.steps() if present > step]
        self._delete(later)
        return later

    def write_best(self, best: Best) -> None:
        """Replace ``best.json`` atomically; either the old or the new content is present at any moment.

        Raises:
            CheckpointError: If the disk fails; the previous file is untouched.
        """
        text = json.dumps(encode(asdict(best), where=BEST_FILE_NAME)[0], allow_nan=False).encode("ascii")
        temporary = self.directory / f"{_BEST_LEFTOVER}{secrets.token_hex(4)}"
        with reporting_disk_errors("write", self.directory / BEST_FILE_NAME):
            for leftover in self.directory.glob(f"{_BEST_LEFTOVER}*"):
                leftover.unlink(missing_ok=True)
            try:
                write_file(temporary, [text])
                os.rename(temporary, self.directory / BEST_FILE_NAME)
            except BaseException:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
                raise
            sync_directory(self.directory)

    def read_best(self) -> Best | None:
        """Return the content of ``best.json``, or None if there is none.

        Raises:
            CheckpointError: If it cannot be read or is not in the format of :meth:`write_best`.
        """
        path = self.directory / BEST_FILE_NAME
        with reporting_disk_errors("read", path):
            try:
                content = read_regular_file(path)
            except FileNotFoundError:
                return None
        try:
            best = Best(**decode(load_json(content), {}))
            if type(best.step) is not int or type(best.value) not in (int, float) or type(best.metric) is not str:
                raise ValueError("its entries have the wrong types")
        except (ValueError, TypeError, CheckpointError) as error:
            raise CheckpointError(
                f"{path} does not name a best step: {error}; delete it, and the next evaluation writes it again.",
                path=path,
            ) from error
        return best

    def name_best(self, best: Best | None) -> list[int]:
        """Name the best step that has a checkpoint in ``best.json``; returns it as the one to protect.

        Without such a step the file is removed: it may name a step that the run has undone and will repeat.

        Raises:
            CheckpointError: If the disk fails.
        """
        if best is not None and best.step in self.steps():
            self.write_best(best)
            return [best.step]
        with reporting_disk_errors("remove", self.directory / BEST_FILE_NAME):
            (self.directory / BEST_FILE_NAME).unlink(missing_ok=True)
        return []

    @with_retries
    def _entries(self) -> list[os.DirEntry[str]]:
        """List names with their kinds at one moment: an entry may be gone by the time its kind is queried."""
        try:
            with os.scandir(self.directory) as entries:
                return list(entries)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _hidden(self, purpose: str, step: int) -> Path:
        return self.directory / f".{purpose}-{checkpoint_name(step)}-{secrets.token_hex(4)}"

    def _publish(self, temporary: Path, target: Path, *, replace: bool) -> None:
        replaced = _replaced_path(target)
        moved = replace and os.path.lexists(target)
        if moved:
            os.rename(target, replaced)
        try:
            os.rename(temporary, target)
        except OSError:
            if moved:
                with contextlib.suppress(OSError):
                    os.rename(replaced, target)
            raise
        sync_directory(self.directory)
        self._delete_replaced(target)

    def _delete_replaced(self, target: Path) -> None:
        # The new checkpoint is durable by now: a failure here only costs space, and the next save tries again.
        hidden = self._hidden("deleting", step_of(target) or 0)
        with contextlib.suppress(OSError):
            os.rename(_replaced_path(target), hidden)
            _remove(hidden)

    def _delete(self, steps: list[int]) -> None:
        if not steps:
            return
        hidden: list[Path] = []
        with reporting_disk_errors("delete old checkpoints in", self.directory):
            for step in steps:
                path = self.directory / checkpoint_name(step)
                for each in (_replaced_path(path), path):
                    if os.path.lexists(each):
                        hidden.append(self._hidden("deleting", step))
                        os.rename(each, hidden[-1])
            # Remove names before content: a power cut must not restore a name whose files are gone.
            sync_directory(self.directory)
            for path in hidden:
                _remove(path)


def retry_if_replaced(locate: Callable[[], Path], read: Callable[[Path], T]) -> T:
    """Read a checkpoint; if another process replaces it meanwhile, read the new one.

    Raises:
        CheckpointError: As raised by ``read``, for a checkpoint that was not replaced.
    """
    while True:
        path = locate()
        identity = _identity(path)
        try:
            return read(path)
        except CheckpointError:
            if (locate(), _identity(path)) == (path, identity):
                raise


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint to resume from, and newer unusable ones.

    Attributes:
        path: The checkpoint, or None to start at step 0.
        step: Its step; 0 without one.
        damaged: Newer checkpoints that do not verify, newest first.
        incidents: Findings to report in the run's events, by kind.
    """

    path: Path | None
    step: int
    damaged: tuple[DamagedCheckpoint, ...] = ()
    incidents: tuple[tuple[str, str], ...] = ()


def choose_resume_point(
    store: CheckpointStore, *, requested: Path | None = None, foreign: Collection[int] = ()
) -> ResumePoint:
    """Choose the checkpoint to resume from: the requested one, or the newest complete one, without changing anything.

    One process chooses and broadcasts its choice, so that all load the same checkpoint.

    Args:
        store: The run's checkpoints.
        requested: The requested one.
        foreign: Steps whose checkpoints belong to another run.

    Raises:
        CheckpointError: If the requested one is not complete; another is never used instead.
    """
    if requested is not None:
        return ResumePoint(requested, verify(requested).step)
    path, damaged = store.newest_complete(exclude=foreign)
    return ResumePoint(path, 0 if path is None else step_of(path) or 0, tuple(damaged))


def _identity(path: Path) -> tuple[int, int] | None:
    """Return a value that identifies this very directory or link, whatever its name; None if it does not exist."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _remove(path: Path) -> None:
    """Delete a checkpoint; for a link to one, delete only the link."""
    if path.is_symlink() or not path.is_dir():  # on a named pipe, rmtree would wait for a writer
        path.unlink()
    else:
        shutil.rmtree(path)


def checkpoint_name(step: int) -> str:
    """Return the name of a step's checkpoint directory."""
    if step < 0:
        raise CheckpointError(f"found step {step}, but a checkpoint's step is 0 or more.")
    return f"step-{step:08d}"


def _replaced_path(path: Path) -> Path:
    return path.with_name(path.name + _REPLACED)
