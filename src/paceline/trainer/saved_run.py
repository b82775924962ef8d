"""What saving, the records and the summary see of a run, whoever writes its loop."""

from __future__ import annotations

import abc
from dataclasses import dataclass

import torch
from torch import nn

from paceline.checkpoint.publish import BackgroundWriter, Publisher
from paceline.checkpoint.state import Registry
from paceline.checkpoint.store import Best
from paceline.data.order import StepGeometry
from paceline.distributed.collectives import Collectives
from paceline.distributed.strategy import Heartbeat
from paceline.host.world import World
from paceline.plan import Occasion, Plan
from paceline.recipe.schema import Recipe
from paceline.records.run_directory import RunDirectory
from paceline.telemetry.clock import StepClock
from paceline.telemetry.display import Display
from paceline.trainer.mirroring import Mirroring
from paceline.trainer.process_settings import StopRequest
from paceline.trainer.recorder import Recorder
from paceline.trainer.step_stats import Progress, Window
from paceline.trainer.utilisation import Utilisation


@dataclass(kw_only=True)
class SavedRun(abc.ABC):
    """What saving, the records and the summary need of a run on one process, whoever writes its loop.

    The plan is authoritative; mutable state is in :attr:`components`.

    Attributes:
        components: The contents of a checkpoint, by name.
        publisher: Publishes checkpoints: complete ones on the first rank, or this rank's shards.
        writer: The thread in which it does.
        identity: Unique identity of this run.
        saved_position: Position of the newest checkpoint; -1 before the first.
        saved_name: Its directory name; empty before the first.
        mirroring: Copies checkpoints to an address, on the first rank; None without ``checkpoint.mirror``.
        utilisation: Reference for the throughput; None for an unknown device, and on other ranks.
    """

    recipe: Recipe
    identity: str
    plan: Plan
    world: World
    device: torch.device
    collectives: Collectives
    directory: RunDirectory
    geometry: StepGeometry
    progress: Progress
    window: Window
    clock: StepClock
    heartbeat: Heartbeat
    recorder: Recorder
    display: Display
    stop: StopRequest
    components: Registry
    publisher: Publisher
    writer: BackgroundWriter
    mirroring: Mirroring | None = None
    utilisation: Utilisation | None = None
    saved_position: int = -1
    saved_name: str = ""

    @abc.abstractmethod
    def models(self) -> dict[str, nn.Module]:
        """The sets of weights by name."""

    @abc.abstractmethod
    def sync_buffers(self) -> None:
        """Broadcast their buffers from the first rank, before they are scored or saved; a collective."""

    @property
    @abc.abstractmethod
    def unmeasured(self) -> frozenset[str]:
        """Phases whose time cannot be separated from others here."""

    @property
    def is_sharded(self) -> bool:
        """Whether each process saves its part of the state."""
        return False

    @property
    def best(self) -> Best | None:
        """The best evaluation so far, if its checkpoint is kept."""
        best = self.progress.best
        if not best or not self.recipe.checkpoint.keep_best:
            return None
        return Best(best["step"], best["metric"], best["value"], best["weights"])

    def mfu(self, samples_per_second: float | None) -> dict[str, float | None]:
        """Return the fraction of the devices' peak that a throughput reaches, as recorded; empty if unknown."""
        return {} if self.utilisation is None else self.utilisation.for_record(samples_per_second)

    def due(self, occasion: Occasion, *, ahead: int = 0) -> bool:
        """Whether something done periodically and at the end is due now (or ``ahead`` steps later)."""
        return self.plan.is_due(occasion, self.progress.position + ahead)

    @property
    def last_good(self) -> str:
        """Name the newest checkpoint in a sentence; non-finite state is never saved."""
        if not self.saved_name:
            return "No checkpoint was saved before."
        return f"The last good checkpoint is {self.directory.checkpoints / self.saved_name}."
