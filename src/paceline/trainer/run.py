"""The parts of a run while it trains, on one process.

Only what drives a run uses this class: build, loop, step and train. The warm-up, saving and the records see what
``trainer/run_views.py`` lists; components receive what they need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from paceline.data.balance import StepLoad
from paceline.data.batch import Batch
from paceline.data.pipeline import Pipeline, TimedPipeline, as_timed
from paceline.data.slices import SampleIds
from paceline.distributed.strategy import NO_SAMPLES, VOTE_LAG, ControlFlags, Strategy
from paceline.distributed.watchdog import Watchdog
from paceline.metrics.accumulator import Metric
from paceline.models.compiled import CompiledNetwork
from paceline.models.precision import Precision
from paceline.models.transfer import FreezeSchedule
from paceline.optim.build import Clipping, ExponentialMovingAverage
from paceline.plan.rates import Schedules
from paceline.tasks.facts import best_metric
from paceline.tasks.own_code import RefusedBroadcast, checked_loss, naming
from paceline.tasks.task import Task
from paceline.trainer.evaluate import Evaluator
from paceline.trainer.listeners import Callbacks, Listener
from paceline.trainer.nonfinite import NonFiniteGuard
from paceline.trainer.saved_run import SavedRun


@dataclass(kw_only=True)
class Run(SavedRun):
    """The parts of a run that the trainer's own loop trains.

    Attributes:
        network: The bare network; what the optimizer, checkpoints and digests see.
        scored: Networks that evaluation calls, by set of weights: the network and its average, compiled if requested.
        compiled: The compiled ones among these.
        strategy: Holds the network as the step calls it, compiled and wrapped.
        previews: What looks at the batches before the first step; each returns the stream with every batch put back.
        listeners: What follows the run without changing it.
    """

    task: Task
    pipeline: Pipeline
    network: nn.Module
    scored: Mapping[str, Any]
    compiled: Mapping[str, CompiledNetwork]
    strategy: Strategy
    optimizer: torch.optim.Optimizer
    schedules: Schedules
    clipping: Clipping
    precision: Precision
    guard: NonFiniteGuard
    freeze_schedule: FreezeSchedule | None
    ema: ExponentialMovingAverage | None
    evaluator: Evaluator
    watchdog: Watchdog
    callbacks: Callbacks
    previews: list[Callable[[Iterator[Batch]], Iterator[Batch]]] = field(default_factory=list)
    listeners: list[Listener] = field(default_factory=list)

    def train_batches(self) -> Iterator[Batch]:
        """This process's micro-batches from the current position to the end."""
        first, last = self.progress.position, self.plan.total_steps
        return self.pipeline.train_batches(self.geometry, first, last, self.world)

    def begin_step(self) -> None:
        """Notify all followers that a step starts."""
        self.guard.begin_step()
        self.task.pop_logged_values()  # left over from before the first step, or from an evaluation
        self.heartbeat.begin_step(self.progress.position + 1)
        if self.freeze_schedule is not None:
            self.freeze_schedule.at(self.progress.step)
        for each in self.listeners:
            each.begin_step()

    def loss(self, model: Callable[..., Any], batch: Batch) -> torch.Tensor:
        """Return the task's loss of a micro-batch; only the network's forward pass is under autocast."""
        # In a new run's first step; a compiled network would be traced with it.
        checks = self.task.is_own and not self.progress.position and self.plan.compile == "off"
        checked = RefusedBroadcast(self.task, "loss", batch.targets) if checks else nullcontext()
        with ExitStack() as around:
            network = self.precision.applied_to(model)
            for each in self.listeners:
                around.enter_context(each.around_forward(model, batch))
            around.enter_context(self.precision.keeping_casts())
            around.enter_context(naming(self.task, "loss"))
            around.enter_context(checked)
            loss = self.task.loss(network, batch)
        checked_loss(self.task, loss, needs_gradient=batch.weight > 0)
        for each in self.listeners:
            each.after_loss(loss)
        return loss

    def backward(self, loss: torch.Tensor, batch: Batch) -> None:
        """Run the backward pass of a micro-batch."""
        with ExitStack() as around:
            for each in self.listeners:
                around.enter_context(each.around_backward(batch))
            self.precision.backward(loss)

    @property
    def needs_norm(self) -> bool:
        """Whether this step's gradient norm is needed, also where nothing is clipped."""
        return self.due("log", ahead=1) or any(each.needs_norm for each in self.listeners)

    def control_flags(self) -> ControlFlags:
        """Return this process's flags: stop, if requested or if checkpoints can no longer be written, and save."""
        stop = self.stop.requested or self.writer.has_failed or bool(self.callbacks.stopped_by)
        stop = stop or (self.mirroring is not None and self.mirroring.has_failed)
        is_due = self.world.is_first and not self.writer.is_busy and self.publisher.cadence.is_due()
        return ControlFlags(stop=stop, save=is_due)

    @property
    def load(self) -> StepLoad | None:
        """Amount of computation of the last step, over all processes; None if samples have no lengths."""
        return self.geometry.load(self.progress.position - 1, self.world.world_size)

    @property
    def timed_pipeline(self) -> TimedPipeline | None:
        """The pipeline, if it reports when it moves batches to the device."""
        return as_timed(self.pipeline)

    @property
    def unmeasured(self) -> frozenset[str]:
        """Phases whose time cannot be separated from others here."""
        parts = {"communication": self.strategy.measures_communication, "h2d": self.timed_pipeline is not None}
        return frozenset(phase for phase, is_measured in parts.items() if not is_measured)

    @property
    def may_skip(self) -> bool:
        """Whether a step may use up its samples without changing the weights, while the run continues."""
        return self.precision.scaler is not None or self.guard.skips

    def span(
        self, phase: str, *, synchronizes: bool = False, samples: SampleIds = NO_SAMPLES
    ) -> AbstractContextManager[None, None]:
        """Context around a phase of a step: times it and reports it to the watchdog.

        Args:
            phase: One of the clock's phases.
            synchronizes: Whether the processes wait for one another inside.
            samples: The samples being processed.
        """
        self.heartbeat.enter(phase, last=synchronizes, samples=samples)
        return self.clock.span(phase)

    def models(self) -> dict[str, nn.Module]:
        """The sets of weights by name."""
        return {"model": self.network} | ({} if self.ema is None else {"ema": self.ema.module})

    def checkpoint_due(self, agreed: ControlFlags) -> bool:
        """Whether to save now: by step count, by time, or because the last evaluation was the best so far."""
        # A flag that is read late still applies after the save that it requested.
        is_new = self.saved_position < 0 or self.progress.position - self.saved_position > VOTE_LAG
        found_best = self.best is not None and self.progress.best["position"] == self.progress.position
        return self.due("checkpoint") or (agreed.save and is_new) or found_best

    def ending(self, agreed: ControlFlags) -> str:
        """Return why the run ends here, or an empty string; the same on all processes."""
        if self.progress.position >= self.plan.total_steps:
            return "duration"
        if self.plan.until_step is not None and self.progress.position >= self.plan.until_step:
            return "until"
        patience = self.recipe.evaluate.patience
        if patience is not None and self.progress.evaluations_since_best >= patience:
            return "patience"
        return "signal" if agreed.stop else ""

    @property
    def is_sharded(self) -> bool:
        """Whether each process saves its part of the state."""
        return self.strategy.is_sharded

    def sync_buffers(self) -> None:
        """Broadcast their buffers from the first rank, before they are scored or saved; a collective."""
        self.strategy.sync_buffers(list(self.models().values()))

    def best_metric(self) -> Metric:
        """The metric that decides which evaluation is best."""
        return best_metric(self.task)
