"""What a part of the trainer sees of a run: narrow protocols, which :class:`paceline.trainer.run.Run` fulfils.

Only what drives a run knows the class itself: build, loop, step and train.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from paceline.data.batch import Batch
from paceline.data.order import StepGeometry
from paceline.data.pipeline import Pipeline
from paceline.distributed.collectives import Collectives
from paceline.distributed.strategy import Heartbeat, Strategy
from paceline.host.world import World
from paceline.models.compiled import CompiledNetwork
from paceline.models.precision import Precision
from paceline.models.transfer import FreezeSchedule
from paceline.optim.build import ExponentialMovingAverage
from paceline.plan import Plan
from paceline.plan.rates import Schedules
from paceline.recipe.schema import Recipe
from paceline.records.run_directory import RunDirectory
from paceline.tasks.task import Task
from paceline.telemetry.clock import StepClock
from paceline.telemetry.display import Display
from paceline.trainer.evaluate import Evaluator
from paceline.trainer.listeners import Listener
from paceline.trainer.mirroring import Mirroring
from paceline.trainer.process_settings import StopRequest
from paceline.trainer.recorder import Recorder
from paceline.trainer.step_stats import Progress, Window


class _Seen(Protocol):
    """What all of them see."""

    recipe: Recipe
    plan: Plan
    world: World
    collectives: Collectives
    strategy: Strategy
    progress: Progress
    recorder: Recorder
    display: Display
    clock: StepClock

    def models(self) -> dict[str, nn.Module]:
        """The sets of weights by name."""
        ...


class _Passes(_Seen, Protocol):
    """What sees the network and its batches."""

    device: torch.device
    task: Task
    pipeline: Pipeline
    scored: Mapping[str, Any]
    compiled: Mapping[str, CompiledNetwork]
    geometry: StepGeometry
    precision: Precision
    evaluator: Evaluator


class ProbedRun(_Passes, Protocol):
    """What passes outside a step see: the warm-up, checks of the first batch, the forecast, and studies."""

    network: nn.Module
    optimizer: torch.optim.Optimizer
    freeze_schedule: FreezeSchedule | None
    ema: ExponentialMovingAverage | None
    heartbeat: Heartbeat
    stop: StopRequest

    def loss(self, model: Callable[..., Any], batch: Batch) -> torch.Tensor:
        """Return the task's loss of a micro-batch."""
        ...


class RecordedRun(_Passes, Protocol):
    """What the records see."""

    identity: str
    directory: RunDirectory
    schedules: Schedules
    window: Window
    mirroring: Mirroring | None
    listeners: list[Listener]

    @property
    def last_good(self) -> str:
        """Name the newest checkpoint in a sentence."""
        ...

    @property
    def may_skip(self) -> bool:
        """Whether a step may use up its samples without changing the weights."""
        ...

    @property
    def unmeasured(self) -> frozenset[str]:
        """Phases whose time cannot be separated from others here."""
        ...

    def mfu(self, samples_per_second: float | None) -> dict[str, float | None]:
        """Return the fraction of the devices' peak that a throughput reaches, as recorded."""
        ...
