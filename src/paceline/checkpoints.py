"""Checkpoints for anybody's loop: asynchronous, atomic, and verified before they are loaded."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from paceline.checkpoint.format import inventory
from paceline.checkpoint.manifest import check_component_names, read_components, read_manifest
from paceline.checkpoint.publish import BackgroundWriter
from paceline.checkpoint.state import Component, HostCopies, OptimizerComponent, Registry, State, bare_module, has_state
from paceline.checkpoint.store import CheckpointStore, step_of
from paceline.distributed.current import current_collectives
from paceline.errors import CheckpointError, did_you_mean
from paceline.parsing.arguments import folder as path_of
from paceline.parsing.arguments import shown, whole
from paceline.records.run_directory import RunDirectory

_VALUES = "plain_values"  # the fact in a manifest that lists the parts without a state_dict
_PLAIN = (dict, list, tuple, str, int, float, Tensor, type(None))


class Checkpoints:
    """The newest checkpoints of a training, in a folder that all ranks see.

    A *part* is anything with ``state_dict`` and ``load_state_dict``: modules, optimizers, schedulers, a ``GradScaler``,
    a :class:`~paceline.order.BatchOrder`, a :class:`~paceline.ledger.Ledger`. It may also be a plain value: dict, list,
    tuple, str, int, float, bool, None or a tensor.

    Every rank calls the methods with the same parts. The first rank's state is saved, and loaded on all ranks: parts
    must be equal on all, as with ``DistributedDataParallel``. Sharded parts are refused.

    A checkpoint is a folder ``step-00000120`` of JSON and safetensors files: nothing in it can run code. It gets its
    name once it is whole and on the disk, and only then are older ones removed. Tensors keep their dtype.

    Args:
        folder: Where the checkpoints are; created at the first save.
        keep: Number of checkpoints to keep, at least 1.

    Attributes:
        values: The plain values among the parts given to :meth:`load`, by name: as saved, or if there is no checkpoint,
            as given.

    Raises:
        CheckpointError: If ``keep`` is less than 1.

    Example:
        >>> checkpoints = Checkpoints("checkpoints")
        >>> done = checkpoints.load(model=model, optimizer=optimizer, best=0.0) or 0
        >>> best = checkpoints.values["best"]
        >>> for step in range(done + 1, 1001):
        ...     train_step()
        ...     if step % 100 == 0:
        ...         checkpoints.save(step, model=model, optimizer=optimizer, best=best)
        >>> checkpoints.wait()
    """

    def __init__(self, folder: str | Path, keep: int = 3) -> None:
        self.values: dict[str, Any] = {}
        self._keep = whole("keep", keep, 1, error=CheckpointError)
        self._store = CheckpointStore(path_of("folder", folder, error=CheckpointError))
        self._copies = HostCopies()
        self._writer = BackgroundWriter()
        weakref.finalize(self, _end, self._writer, os.getpid())

    def save(self, step: int, **parts: Any) -> None:
        """Copy the parts and write the copy in the background; a checkpoint of the same step is replaced.

        Waits for the previous save first.

        Args:
            step: Steps done.
            parts: The parts, by name.

        Raises:
            CheckpointError: On every rank: if ranks disagree on step or names, a part holds what cannot be saved, the
                folder is not writable, or the previous save failed.
        """
        step = whole("step", step, error=CheckpointError)
        collectives = current_collectives()
        found = collectives.gather((step, sorted(parts)))
        for rank, (other, names) in enumerate(found):
            if other != found[0][0]:
                raise CheckpointError(
                    f"Rank 0 saves step {found[0][0]} and rank {rank} step {other}: call save() after the same step on "
                    "every rank."
                )
            if names != found[0][1]:
                raise CheckpointError(
                    f"Rank 0 saves {', '.join(found[0][1])} and rank {rank} {', '.join(names)}: give the same parts on "
                    "every rank."
                )
        # On every rank: a ledger, for example, is flushed by this. It relies on the previous checkpoint being whole.
        collectives.on_rank_zero(self.wait)
        states = collectives.on_all_ranks(lambda: _states(parts))
        collectives.on_rank_zero(partial(self._begin_save, step, states, sorted(parts.keys() - _stateful(parts))))

    def load(self, **parts: Any) -> int | None:
        """Load the newest checkpoint that verifies, and return its step; None if there is none.

        No part is changed unless all fit.

        Args:
            parts: The parts, by the names they were saved under; None leaves a saved one out. For a plain value, what
                ``values`` has if there is no checkpoint.

        Raises:
            CheckpointError: On every rank: if a part was not saved, a saved one is not given, or one does not fit; or
                if no checkpoint is whole, or one cannot be read now.
        """
        collectives = current_collectives()
        collectives.on_rank_zero(self.wait)
        path = collectives.on_rank_zero(self._newest)
        plain = {name: part for name, part in parts.items() if part is not None and name not in _stateful(parts)}
        if path is None:
            self.values = plain
            return None
        self.values = collectives.on_all_ranks(lambda: _restore(path, parts, plain))
        return step_of(path)

    def wait(self) -> None:
        """Wait until the last save is on the disk; call this at the end of the training.

        Raises:
            CheckpointError: If it failed; existing checkpoints are untouched.
        """
        self._writer.wait()

    def _newest(self) -> Path | None:
        path, damaged = self._store.newest_complete()
        for each in damaged:
            loaded = "none is loaded" if path is None else f"{path.name} is loaded instead"
            warnings.warn(f"A damaged checkpoint is passed over, {loaded}: {each.reason}", stacklevel=2)
        if path is None and damaged:
            raise CheckpointError(
                f"No checkpoint in {self._store.directory} is whole: restore one from a copy, or remove them to start "
                "from the beginning."
            )
        if path is None:
            RunDirectory(self._store.directory).create()  # not hours later, at the first save
        return path

    def _begin_save(self, step: int, states: Mapping[str, State], values: list[str]) -> None:
        RunDirectory(self._store.directory).create()
        copies = {name: self._copies.take(name, state) for name, state in states.items()}
        self._copies.finish()

        def write() -> None:
            self._store.save(step, copies, {_VALUES: values}, replace=True)
            self._store.prune(keep=self._keep)

        self._writer.submit(write)


def _stateful(parts: Mapping[str, Any]) -> dict[str, Component]:
    """Return the parts with a state of their own, without what wraps a module."""
    found: dict[str, Component] = {}
    for name, part in parts.items():
        if isinstance(part, Optimizer):
            found[name] = OptimizerComponent(part)
        elif has_state(part):
            found[name] = bare_module(part)
    return found


def _states(parts: Mapping[str, Any]) -> dict[str, State]:
    """Return the state of each part; that of a plain value is a dictionary with it.

    Raises:
        CheckpointError: Naming what cannot be saved.
    """
    check_component_names(parts)
    stateful = _stateful(parts)
    states: dict[str, State] = {}
    for name, part in parts.items():
        if name not in stateful and not isinstance(part, _PLAIN):
            raise CheckpointError(
                f"{name!r} is {shown(part)}, which has no state_dict and load_state_dict: give an object with both, or "
                "a plain value.",
                key=name,
            )
        state: Any = stateful[name].state_dict() if name in stateful else {"value": part}
        if not isinstance(state, Mapping):
            message = f"state_dict() of {name!r} returned {shown(state)}, but must return a dict: correct it."
            raise CheckpointError(message, key=name)
        inventory(dict(state), where=name)
        states[name] = state
    return states


def _restore(path: Path, parts: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Restore the parts with a state, all or none of them, and return the plain values.

    Raises:
        CheckpointError: Naming the part that does not fit.
    """
    manifest, stateful = read_manifest(path), _stateful(parts)
    saved, values = set(manifest.components), set(manifest.facts[_VALUES])
    for name in parts.keys() - saved:
        raise CheckpointError(
            f"{path} holds no part {name!r}; it holds {', '.join(sorted(saved))}: load what was saved."
            f"{did_you_mean(name, saved)}",
            key=name,
            path=path,
        )
    for name in sorted(saved - parts.keys()):
        message = f"{path} also holds {name!r}: give it to load(), or {name}=None to leave it out."
        raise CheckpointError(message, key=name, path=path)
    for name in sorted((values & stateful.keys()) | (plain.keys() - values)):
        kinds = ("a plain value", "an object with a state_dict")
        raise CheckpointError(
            f"{name!r} was saved as {kinds[name not in values]} and cannot be loaded as {kinds[name in values]}: give "
            "what was saved.",
            key=name,
            path=path,
        )
    states = read_components(path, [*stateful, *plain])
    registry = Registry("Make the parts as they were when they were saved.")
    for name, part in stateful.items():
        registry.add(name, part)
    registry.restore({name: states[name] for name in stateful})
    return {name: states[name]["value"] for name in plain}


def _end(writer: BackgroundWriter, process: int) -> None:
    """Wait for the last save; nobody is left to whom its error could be raised."""
    if os.getpid() != process:
        return  # a forked process has no such thread
    try:
        writer.close()
    except Exception as error:  # noqa: BLE001 - whatever it was, the training is over
        warnings.warn(f"The last checkpoint was not saved: {error}", stacklevel=2)
