"""The ledger for anybody's loop: which samples each step used; ``paceline audit FOLDER`` counts them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from paceline.distributed.current import current_world
from paceline.errors import DataError, RunDirectoryError
from paceline.parsing.arguments import checked_step, whole
from paceline.parsing.arguments import folder as path_of
from paceline.records.ledger import LedgerWriter, ledger_files, ledger_path, read_ledger, truncate_ledgers
from paceline.records.own_ledger import OwnLedger, read_own_ledger
from paceline.records.run_directory import RunDirectory


class Ledger:
    """The samples that each step of a training used, in a folder that all ranks see.

    Every rank adds its own samples, to its own file. ``paceline audit FOLDER`` says for each epoch how many samples are
    missing, and how many uses were repeated. A kill loses no step; a power cut may lose those since the last
    checkpoint.

    Give the ledger to :class:`~paceline.checkpoints.Checkpoints` as a part: a load removes the steps that the loop will
    repeat. With other checkpoints, call ``ledger.load_state_dict({"step": step})`` before the first :meth:`add`.

    Args:
        folder: Where the files are; created if needed.
        samples: Number of samples in the data set.
        dropped: Samples that each epoch leaves out, such as ``samples % batch_size`` with ``drop_last``.
        rank: This process; by default as for :class:`~paceline.order.BatchOrder`.
        world_size: Number of processes; likewise.

    Raises:
        RunDirectoryError: If the folder is not writable, or holds the ledger of another data set.

    Example:
        >>> ledger = Ledger("ledger", samples=len(data))
        >>> for step, (inputs, targets, ids) in enumerate(loader, start=1):
        ...     train(inputs, targets)
        ...     ledger.add(step, ids)
    """

    def __init__(
        self,
        folder: str | Path,
        samples: int,
        *,
        dropped: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self._folder, self._world = path_of("folder", folder), current_world(rank, world_size)
        samples, dropped = whole("samples", samples, 1), whole("dropped", dropped)
        if dropped >= samples:
            raise DataError(
                f"samples={samples} and dropped={dropped}, but an epoch uses at least 1 sample: leave out fewer.",
                key="dropped",
                value=dropped,
            )
        self._facts = OwnLedger(samples=samples, dropped=dropped)
        RunDirectory(self._folder).create()
        found = read_own_ledger(self._folder)
        if found is None:
            if self._world.is_first:
                self._facts.write(self._folder)
        elif (found.samples, found.dropped) != (samples, dropped):
            raise RunDirectoryError(
                f"'{self._folder}' is the ledger of {found.samples} samples with {found.dropped} dropped, not of "
                f"{samples} with {dropped}: give the data it was begun with, or another folder.",
                path=self._folder,
            )
        else:
            self._facts = found
        self._path = ledger_path(self._folder, self._world.rank)
        self._step = 0
        self._writer: LedgerWriter | None = None  # until the first record
        self._is_placed = self._is_asked = False

    def add(self, step: int, ids: Tensor | np.ndarray[Any, Any] | Sequence[int]) -> None:
        """Record samples that a step used; may be called several times a step.

        Args:
            step: The step that used them; the first is 1.
            ids: Their positions in the data set, integers [N].

        Raises:
            DataError: If a step or an id is out of range, or ``ids`` is not a row of integers.
            RunDirectoryError: If the folder already holds this step and no checkpoint was loaded, or the disk fails.
        """
        try:
            row = np.asarray(ids.cpu() if isinstance(ids, Tensor) else ids)
        except ValueError:  # rows of different lengths
            row = np.asarray(None)
        if row.ndim != 1 or (row.size and row.dtype.kind not in "iu"):
            raise DataError(
                f"ids are {row.dtype} {list(row.shape)}, but must be integers [N]: give one id per sample.", key="ids"
            )
        if row.size and not 0 <= row.min() <= row.max() < self._facts.samples:
            wrong = row.min() if row.min() < 0 else row.max()
            raise DataError(
                f"Sample {wrong} is not one of {self._facts.samples} (0 to {self._facts.samples - 1}): give the ids of "
                "the data set, and its length as samples.",
                key="ids",
                value=int(wrong),
            )
        row, step = row.astype(np.int64), whole("step", step, 1)
        if step < self._step:
            raise DataError(
                f"Step {step} was added after step {self._step}, but steps never decrease: after loading a checkpoint, "
                "load the ledger's state too.",
                key="step",
                value=step,
            )
        if self._writer is None:
            self._writer = self._open(step)
        self._step = step
        self._writer.append(step=step, epoch=0, ids=row)
        self._writer.flush()

    def state_dict(self) -> dict[str, Any]:
        """Return the last step, once all records are on the disk."""
        if self._writer is not None:
            self._writer.flush(durable=True)
        if self._is_asked:
            self._mark_saved()
        self._is_asked = True  # the checkpoint that this is for may not become whole
        return {"step": self._step}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise a :class:`CheckpointError` if the state is not a ledger's, without changing anything."""
        checked_step(state, "a ledger")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remove the records after a step, which the loop is about to repeat.

        Raises:
            RunDirectoryError: If a file is damaged before its end, or the disk fails.
        """
        self.check_state_dict(state)
        self.close()
        self._cut(state["step"])
        self._step, self._is_placed = state["step"], True
        if self._step:
            self._mark_saved()

    def close(self) -> None:
        """Write everything to the disk; a later :meth:`add` continues."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _mark_saved(self) -> None:
        if self._world.is_first and not self._facts.is_saved:
            self._facts = replace(self._facts, is_saved=True)
            self._facts.write(self._folder)

    def _open(self, step: int) -> LedgerWriter:
        if not self._is_placed:
            last = max((entry.step for entry in read_ledger(self._path)), default=0) if self._path.exists() else 0
            facts = read_own_ledger(self._folder) or self._facts
            if last >= step and facts.is_saved:
                raise RunDirectoryError(
                    f"'{self._folder}' holds steps up to {last}, and step {step} would be recorded again: load the "
                    "checkpoint with the ledger among its parts, or give another folder.",
                    key="step",
                    value=step,
                    path=self._folder,
                )
            # Killed before the first checkpoint: the loop begins again.
            self._cut(step - 1)
            self._is_placed = True
        writer = LedgerWriter(self._path)
        weakref.finalize(self, writer.close)
        return writer

    def _cut(self, step: int) -> None:
        """Remove later records of this rank, and on the first rank those of ranks that are no more."""
        others = {ledger_path(self._folder, rank) for rank in range(self._world.world_size)} - {self._path}
        if not self._world.is_first:
            others |= set(ledger_files(self._folder)) - {self._path}
        truncate_ledgers(self._folder, step, exclude=others)
