"""A guard against silent faults of memory and processors (``verify.every``).

The first step after each save leaves a digest of the state. When a check is due, that checkpoint is loaded, the step is
computed again and compared bit for bit, and the run's state is put back. With two replicas, and with any number in an
exact run, each computes the next one's micro-batches. Otherwise it computes its own: an all-reduce sums in an order
that depends on the ranks, so that three replicas that exchange their parts would get other bits.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from paceline.checkpoint.manifest import read_components
from paceline.checkpoint.state import Component, HostCopies, OptimizerComponent
from paceline.checkpoint.store import step_of
from paceline.data.batch import Batch
from paceline.distributed.exact import ExactDataParallel
from paceline.distributed.strategy import ControlFlags
from paceline.errors import CheckpointError, TrainingError
from paceline.telemetry.clock import build_step_clock
from paceline.trainer.nonfinite import NonFiniteGuard
from paceline.trainer.run import Run
from paceline.trainer.saving import finish_saving
from paceline.trainer.step import train_step

Digests = dict[str, str]
_MOST_NAMED = 3


@dataclass(frozen=True)
class KeptStep:
    """The first step after a checkpoint, as it was computed in training.

    Attributes:
        checkpoint: Directory name of the checkpoint.
        step: The checkpoint's optimizer steps.
        position: Its global batches.
        digests: Of each tensor after the step, by component and name.
    """

    checkpoint: str
    step: int
    position: int
    digests: Digests


class StepVerifier:
    """Keeps the digests of a step, and computes it again."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._step: KeptStep | None = None
        self._copies = HostCopies()
        self._is_on = run.plan.verify_every_steps is not None

    def after_step(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Keep the digests of the first step after a save; if a check is due, compute that step again; a collective.

        Called before an evaluation, which gives all processes the first one's buffers.

        Returns:
            The stream of batches; a check ends it, and opens another.

        Raises:
            TrainingError: On every process, if the step's result differs from that of the training.
        """
        run = self._run
        if not self._is_on:
            return batches
        path = run.directory.checkpoints / run.saved_name
        if run.progress.position == run.saved_position + 1 and (step := step_of(path)) is not None:
            self._step = KeptStep(run.saved_name, step, run.saved_position, self._digests())
        if self._step is None or not run.due("verify"):
            return batches
        return run.train_batches() if self._check(self._step) else batches

    def _check(self, kept: KeptStep) -> bool:
        """Compute a step again; returns whether the stream of batches was ended."""
        run = self._run
        run.heartbeat.enter("verify")
        finish_saving(run)
        with run.clock.paused():
            try:
                states = run.collectives.on_all_ranks(partial(self._read, kept))
            except CheckpointError as error:  # pruned, or damaged: another one follows
                run.recorder.incident("verify", f"step {kept.step + 1} was not computed again: {error}")
                return False
            with self._state_kept():
                first = self._differing(kept, states)
                again = self._differing(kept, states) if first else {}
        run.heartbeat.begin_step(run.progress.position)
        if first:
            self._fail(kept, first, again)
        return True

    def _components(self) -> dict[str, Component]:
        run = self._run
        found: dict[str, Component] = {**run.models(), "optimizer": OptimizerComponent(run.optimizer)}
        return found | ({} if run.precision.scaler is None else {"scaler": run.precision.scaler})

    def _digests(self) -> Digests:
        found = Digests()
        for name, component in self._components().items():
            _add_digests(found, name, component.state_dict())
        return found

    def _read(self, kept: KeptStep) -> Mapping[str, Any]:
        return read_components(self._run.directory.checkpoints / kept.checkpoint, tuple(self._components()))

    @contextlib.contextmanager
    def _state_kept(self) -> Iterator[None]:
        """Context that puts the state back which the run has now."""
        components = self._components()
        states = {name: self._copies.take(name, each.state_dict()) for name, each in components.items()}
        self._copies.finish()
        try:
            yield
        finally:
            self._load(states)

    def _load(self, states: Mapping[str, Any]) -> None:
        for name, component in self._components().items():
            component.load_state_dict(dict(states[name]))

    def _differing(self, kept: KeptStep, states: Mapping[str, Any]) -> dict[int, tuple[str, Digests]]:
        """Compute the step again; by rank whose result differs, its host and the new digests of what differs."""
        run, world = self._run, self._run.world
        count, strategy = world.world_size, run.strategy
        if isinstance(strategy, ExactDataParallel):
            shift = strategy.shift = int(strategy.can_shift and count > 1)
        else:
            shift = int(run.plan.strategy == "ddp" and count == 2)
        self._load(states)
        try:
            self._compute(kept, replace(world, rank=(world.rank + shift) % count))
        finally:
            if isinstance(strategy, ExactDataParallel):
                strategy.shift = 0
        parts = run.collectives.gather((socket.gethostname(), kept.digests, self._digests()))
        found = {}
        for rank, (host, before, _) in enumerate(parts):
            again = parts[(rank - shift) % count][2]
            if names := [name for name in before | again if before.get(name) != again.get(name)]:
                found[rank] = host, {name: again.get(name, "") for name in names}
        return found

    def _compute(self, kept: KeptStep, world: Any) -> None:
        """Take the step with the run's network and optimizer, and without its records."""
        run, replica = self._run, copy.copy(self._run)
        replica.progress = replace(run.progress, step=kept.step, skipped=kept.position - kept.step)
        replica.window = _NoWindow()  # type: ignore[assignment]  # has what a step calls, and records nothing
        replica.listeners, replica.clock = [], build_step_clock(run.device.type)
        train, scaler = run.recipe.train, run.precision.scaler
        replica.guard = NonFiniteGuard(train, run.optimizer, run.network, run.device, active=scaler is None)
        replica.control_flags = ControlFlags  # type: ignore[method-assign]  # nobody is asked to stop or to save
        _time_by(replica)
        replica.clock.start()
        batches = run.pipeline.train_batches(run.geometry, kept.position, kept.position + 1, world)
        try:
            train_step(replica, batches)
        finally:
            _time_by(run)

    def _fail(
        self, kept: KeptStep, first: Mapping[int, tuple[str, Digests]], again: Mapping[int, tuple[str, Digests]]
    ) -> None:
        """End the run; where no two computations agree, an operation is not deterministic, and checks end.

        Raises:
            TrainingError: With the ranks and tensors that differ.
        """
        run, where = self._run, f"step {kept.step + 1}, computed again from {kept.checkpoint},"
        if again and first != again:
            self._is_on = False
            message = (
                f"{where} differs from time to time, so an operation is not deterministic here and nothing can be "
                "checked: verify.every is off from now on."
            )
            run.recorder.incident("verify", message)
            run.display.message(message)
            return
        ranks = []
        for rank, (host, digests) in first.items():
            names = list(digests)
            more = f" and {len(names) - _MOST_NAMED} more" * (len(names) > _MOST_NAMED)
            ranks.append(f"on rank {rank} ({host}) in {', '.join(names[:_MOST_NAMED])}{more}")
        cause = "memory or processor" if again else "memory or processor, now and not in training,"
        message = f"{where} differs {'; '.join(ranks)}: {cause} may be faulty"
        run.recorder.incident("verify", f"{message}.", {"ranks": list(first)})
        run.recorder.flush()
        raise TrainingError(f"{message}; test that machine, and run the same command on another. {run.last_good}")


def _time_by(run: Run) -> None:
    run.strategy.timed_by(run.clock)
    if run.timed_pipeline is not None:
        run.timed_pipeline.timed_by(partial(run.clock.span, "h2d"))


def _add_digests(found: Digests, name: str, state: Any) -> None:
    """Add the digest of each tensor of a component's state, and of everything else in it."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            _add_digests(found, f"{name}.{key}", value)
    elif isinstance(state, list | tuple):
        for index, value in enumerate(state):
            _add_digests(found, f"{name}.{index}", value)
    elif isinstance(state, torch.Tensor):
        content: Any = state.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        found[name] = hashlib.blake2b(content, digest_size=16).hexdigest()
    else:
        found[name] = repr(state)


class _NoWindow:
    """Takes what a step reports, and keeps nothing."""

    grad_norm: torch.Tensor | None = None

    def add(self, loss: torch.Tensor, batch: Any) -> None:
        """Keep nothing."""

    def end_step(self, *, stepped: bool, combined: torch.Tensor | None = None) -> None:
        """Keep nothing."""
