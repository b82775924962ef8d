"""How are checkpoints kept so that there is always a whole one?

A checkpoint is written under a hidden name, flushed, and renamed into place: under its own name it is whole
or absent. Older ones go only after the new one is durable, and leave their name before they are deleted.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from paceline.checkpoint.best import FILE_NAME as BEST_FILE_NAME
from paceline.checkpoint.best import Best, read_best, write_best
from paceline.checkpoint.durable import make_directory, patient, reporting_disk_errors, size_of
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.reading import check_sizes, read_component, read_components, read_manifest, verify
from paceline.checkpoint.shares import Together
from paceline.checkpoint.writing import Contents, write_checkpoint, write_share
from paceline.errors import CheckpointError, UnreadableError
from paceline.records.run_directory import sync_directory

__all__ = [
    "Best",
    "CheckpointStore",
    "DamagedCheckpoint",
    "Manifest",
    "SavedCheckpoint",
    "State",
    "Together",
    "read_component",
    "read_components",
    "read_in_place",
    "read_manifest",
    "step_of",
    "verify",
]

State = Mapping[str, Any]
T = TypeVar("T")

_REPLACED = ".replaced"
_NAME = re.compile(r"step-(\d{8,})(\.replaced)?")
_LEFTOVER = re.compile(r"\.(saving|deleting)-step-\d{8,}-[0-9a-f]{8}")


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that is now durable, and what it cost."""

    path: Path
    step: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True)
class DamagedCheckpoint:
    """A directory with the name of a checkpoint that does not verify, and why."""

    path: Path
    step: int | None
    reason: str


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint directory's name, or None if it is not such a name."""
    match = _NAME.fullmatch(Path(path).name)
    return int(match[1]) if match and _name(int(match[1])) == f"step-{match[1]}" else None


class CheckpointStore:
    """The checkpoints of one run, ``RUN/checkpoints``; one process writes, any may read."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)

    def path(self, step: int) -> Path:
        """Return where the checkpoint of a step is, or would be."""
        path = self.directory / _name(step)
        aside = _aside(path)
        # Killed between the two renames of a replacement, the old checkpoint still stands under this name.
        return aside if not os.path.lexists(path) and os.path.lexists(aside) else path

    def save(
        self,
        step: int,
        components: Mapping[str, State],
        facts: Mapping[str, Any],
        *,
        replace: bool = False,
        file_metadata: Mapping[str, str] | None = None,
        together: Together | None = None,
    ) -> SavedCheckpoint:
        """Write a checkpoint; when this returns it survives a kill and a power cut.

        Args:
            step: Optimizer steps done.
            components: State by name; ``NAME.json`` and, if it has tensors, ``NAME.safetensors``.
            facts: JSON-able facts for the manifest; also written as strings into each safetensors header.
            replace: Put it in the place of an existing checkpoint of this step.
            file_metadata: Further entries of each safetensors header, so that a file alone explains itself.
            together: The other processes, if they hold parts of the state and write them with :meth:`write_share`.

        Raises:
            CheckpointError: If it could not be written; the checkpoints that were there are untouched.
        """
        started = time.perf_counter()
        target = self.directory / _name(step)
        contents = Contents.of(step, components, facts)
        with reporting_disk_errors(f"write the checkpoint of step {step} at", target):
            if not replace and os.path.lexists(self.path(step)):
                raise CheckpointError(f"{self.path(step)} exists already; a checkpoint is replaced only on request.")
            temporary = self._make_room(step) if together is None else together.room
            try:
                size = write_checkpoint(temporary, contents, file_metadata or {}, together)
                self._publish(temporary, target, replace=replace)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
        return SavedCheckpoint(target, step, size, time.perf_counter() - started)

    def make_room(self, step: int) -> Path:
        """Make the hidden directory that several processes will write into.

        Raises:
            CheckpointError: If the disk refuses.
        """
        with reporting_disk_errors(f"write the checkpoint of step {step} at", self.directory / _name(step)):
            return self._make_room(step)

    def adopt(self, room: Path, step: int) -> Path:
        """Put a whole checkpoint that was copied into a hidden directory (:meth:`make_room`) under its own name.

        Args:
            room: The directory, verified, and all of it on the disk.
            step: Its step; a checkpoint that is there already is replaced.

        Raises:
            CheckpointError: If the disk refuses.
        """
        target = self.directory / _name(step)
        with reporting_disk_errors(f"put the checkpoint of step {step} at", target):
            sync_directory(room)
            self._publish(room, target, replace=True)
        return target

    def write_share(
        self,
        step: int,
        components: Mapping[str, State],
        facts: Mapping[str, Any],
        *,
        file_metadata: Mapping[str, str],
        together: Together,
    ) -> None:
        """On a process other than the first: write the parts that it holds, and tell the first.

        Raises:
            CheckpointError: If they could not be written; the first process's save fails too.
        """
        contents = Contents.of(step, components, facts)
        with reporting_disk_errors(f"write a part of the checkpoint of step {step} at", together.room):
            write_share(contents, file_metadata, together)

    def steps(self) -> list[int]:
        """Return the steps with a checkpoint of that name, or a link of that name, ascending; none is verified."""
        with reporting_disk_errors("list the checkpoints in", self.directory):
            found = {step_of(Path(entry)) for entry in self._entries() if entry.is_symlink() or entry.is_dir()}
        return sorted(step for step in found if step is not None)

    def newest_whole(self, *, without: Collection[int] = ()) -> tuple[Path | None, list[DamagedCheckpoint]]:
        """Return the newest checkpoint that verifies, and the newer ones that do not, newest first.

        Args:
            without: Steps that are not looked at.

        Raises:
            UnreadableError: If that cannot be found out now.
        """
        return self.read_newest(_verify_step, without=without)

    def read_newest(
        self, read: Callable[[Path], T], *, without: Collection[int] = ()
    ) -> tuple[T | None, list[DamagedCheckpoint]]:
        """Read the newest checkpoint that is whole, while another process may save, rename and prune.

        Args:
            read: Reads a checkpoint; raises a CheckpointError if it is damaged.
            without: Steps that are not looked at.

        Returns:
            What was read, or None if no checkpoint is whole; and the newer ones that are damaged, newest first.

        Raises:
            UnreadableError: If one that may be whole cannot be read now.
        """
        damaged: list[DamagedCheckpoint] = []
        for step in sorted(set(self.steps()).difference(without), reverse=True):
            try:
                return read_in_place(partial(self.path, step), read), damaged
            except UnreadableError:
                raise
            except CheckpointError as error:
                if not os.path.lexists(path := self.path(step)):
                    # It was pruned meanwhile, after a newer one was saved.
                    return self.read_newest(read, without=without)
                damaged.append(DamagedCheckpoint(path, step, str(error)))
        return None, damaged

    def set_aside(self, damaged: DamagedCheckpoint, ending: str = "damaged") -> Path:
        """Rename a checkpoint that cannot be used to ``step-N.damaged``: kept to look at, but no checkpoint any more.

        Raises:
            CheckpointError: If it is not in this store, or cannot be renamed.
        """
        if damaged.path.parent != self.directory or step_of(damaged.path) is None:
            raise CheckpointError(f"{damaged.path} is not a checkpoint in {self.directory}; nothing was renamed.")
        base = f"{damaged.path.name.removesuffix(_REPLACED)}.{ending}"
        target, count = self.directory / base, 1
        while os.path.lexists(target):
            count += 1
            target = self.directory / f"{base}-{count}"
        with reporting_disk_errors("set aside the checkpoint", damaged.path):
            os.rename(damaged.path, target)
            sync_directory(self.directory)
        return target

    def prune(self, *, keep: int, protect: Collection[int] = ()) -> list[int]:
        """Delete all but the ``keep`` newest checkpoints and the steps in ``protect``; call it after a save.

        Only checkpoints with a valid manifest and files of the right size count as kept, so a torn one never
        pushes out a whole one.

        Returns:
            The deleted steps, ascending.

        Raises:
            CheckpointError: If ``keep`` is below 1, or the disk refuses.
        """
        if keep < 1:
            raise CheckpointError(f"found keep={keep}, but at least 1 checkpoint must be kept; give 1 or more.")
        present = self.steps()
        kept = [step for step in present if self._looks_whole(step)][-keep:]
        old = [step for step in present if kept and step < kept[0] and step not in protect]
        self._delete(old)
        return old

    def discard_after(self, step: int) -> list[int]:
        """Delete the checkpoints of later steps, for a run that goes back to ``step`` and on from there.

        Otherwise they would count as the newest: they would push out the new ones, and be resumed from.

        Returns:
            The deleted steps, ascending.

        Raises:
            CheckpointError: If the disk refuses.
        """
        later = [present for present in self.steps() if present > step]
        self._delete(later)
        return later

    def write_best(self, step: int, metric: str, value: float, *, weights: str = "model") -> Best:
        """Record which step is the best so far in ``best.json``, replacing it in one move.

        Args:
            step: A step whose checkpoint is kept.
            metric: Name of the metric that decided.
            value: Its value.
            weights: Which weights it was measured with, ``model`` or ``ema``.

        Raises:
            CheckpointError: If the disk refuses; the previous file is untouched.
        """
        best = Best(step=step, metric=metric, value=value, weights=weights)
        write_best(self.directory, best)
        return best

    def read_best(self) -> Best | None:
        """Return what ``best.json`` says, or None if there is none.

        Raises:
            CheckpointError: If the file is damaged.
        """
        return read_best(self.directory)

    def forget_best(self) -> None:
        """Remove ``best.json``, for a run without a checkpoint of its best step: it may have gone back to before it."""
        with reporting_disk_errors("remove", self.directory / BEST_FILE_NAME):
            (self.directory / BEST_FILE_NAME).unlink(missing_ok=True)

    def size_bytes(self) -> int:
        """What all checkpoints take now, with those that are being written or deleted: it changes while they are."""
        return size_of(self.directory)

    @patient
    def _entries(self) -> list[os.DirEntry[str]]:
        """List names with their kinds, which are those of one moment: to ask for a kind later would be too late."""
        try:
            with os.scandir(self.directory) as entries:
                return list(entries)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _make_room(self, step: int) -> Path:
        make_directory(self.directory)
        self._remove_leftovers()
        room = self._hidden("saving", step)
        os.mkdir(room)
        return room

    def _hidden(self, purpose: str, step: int) -> Path:
        return self.directory / f".{purpose}-{_name(step)}-{secrets.token_hex(4)}"

    def _looks_whole(self, step: int) -> bool:
        try:
            check_sizes(self.path(step))
        except CheckpointError:
            return False
        return True

    def _publish(self, temporary: Path, target: Path, *, replace: bool) -> None:
        aside = _aside(target)
        moved = replace and os.path.lexists(target)
        if moved:
            os.rename(target, aside)
        try:
            os.rename(temporary, target)
        except OSError:
            if moved:
                with contextlib.suppress(OSError):
                    os.rename(aside, target)
            raise
        sync_directory(self.directory)
        self._forget_replaced(target)

    def _forget_replaced(self, target: Path) -> None:
        # The new checkpoint is durable by now: what fails here is only space, and the next save tries again.
        hidden = self._hidden("deleting", step_of(target) or 0)
        with contextlib.suppress(OSError):
            os.rename(_aside(target), hidden)
            _remove(hidden)

    def _remove_leftovers(self) -> None:
        # What a killed save or deletion left. Removing it is a courtesy: a failure must not cost this save.
        for path in map(Path, self._entries()):
            if _LEFTOVER.fullmatch(path.name):
                with contextlib.suppress(OSError):
                    _remove(path)
            elif path.name.endswith(_REPLACED) and step_of(path) is not None:
                original = path.with_suffix("")
                if os.path.lexists(original):
                    self._forget_replaced(original)

    def _delete(self, steps: list[int]) -> None:
        if not steps:
            return
        hidden: list[Path] = []
        with reporting_disk_errors("delete old checkpoints in", self.directory):
            for step in steps:
                for path in _both(self.directory / _name(step)):
                    hidden.append(self._hidden("deleting", step))
                    os.rename(path, hidden[-1])
            # Names first, everywhere: a power cut must not bring back a name whose files are gone.
            sync_directory(self.directory)
            for path in hidden:
                _remove(path)


def read_in_place(find: Callable[[], Path], read: Callable[[Path], T]) -> T:
    """Read a checkpoint that another process may replace meanwhile: if it does, read what took its place.

    Raises:
        CheckpointError: As ``read`` does, of a checkpoint that was there all the time.
    """
    while True:
        path = find()
        before = _identity(path)
        try:
            return read(path)
        except CheckpointError:
            if (find(), _identity(path)) == (path, before):
                raise


def _verify_step(path: Path) -> Path:
    found = verify(path)
    if found.step != step_of(path):
        raise CheckpointError(f"{path} is not a whole checkpoint: manifest.json: it was saved at step {found.step}.")
    return path


def _identity(path: Path) -> tuple[int, int] | None:
    """Return what tells a directory, or a link, from another of that name; None if there is none."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _remove(path: Path) -> None:
    """Delete a checkpoint; of one that lies elsewhere, only the link to it."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def _name(step: int) -> str:
    if step < 0:
        raise CheckpointError(f"found step {step}, but a checkpoint's step is 0 or more.")
    return f"step-{step:08d}"


def _aside(path: Path) -> Path:
    return path.with_name(path.name + _REPLACED)


def _both(path: Path) -> Iterator[Path]:
    yield from (each for each in (_aside(path), path) if os.path.lexists(each))
