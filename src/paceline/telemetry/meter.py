"""What is counted of steps: their phases, sums over some of them, divided only once, and the totals of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

PHASES = ("data_wait", "h2d", "forward", "backward", "communication", "optimizer", "ema", "logging", "host")
"""Parts of a step, in the order in which they come:

- ``data_wait``: for the next batch.
- ``h2d``: copying, normalising and mixing the batch; only the wait for it, if a side stream does this.
- ``forward`` and ``backward``: these passes.
- ``communication``: the exchange of gradients, without what overlaps the backward pass.
- ``optimizer``: clipping and update.
- ``ema``: the moving average.
- ``logging``: writing the record of the steps before.
- ``host``: everything else.
"""

WARMUP_STEPS = 3
HOST = PHASES.index("host")
_DATA_WAIT = PHASES.index("data_wait")


class Load(Protocol):
    """The work of a step per process, if samples differ in length (`data/balance.py`)."""

    @property
    def tokens(self) -> int:
        """Tokens of its samples."""

    @property
    def positions(self) -> int:
        """Token positions, including padding."""

    @property
    def busiest(self) -> int:
        """Token positions of the process that has the most."""

    @property
    def processes(self) -> int:
        """Number of processes."""


@dataclass
class LoadSums:
    """Sums over some steps.

    Attributes:
        tokens: Tokens of the samples.
        positions: Token positions, including padding.
        waited_for: Token positions that all processes would have computed, had each had as many as the largest in its
            step.
    """

    tokens: int = 0
    positions: int = 0
    waited_for: int = 0

    def add(self, load: Load) -> None:
        """Add one step."""
        self.tokens += load.tokens
        self.positions += load.positions
        self.waited_for += load.busiest * load.processes

    def figures(self) -> dict[str, float | None]:
        """Return the fractions of these, as step records have them; empty without tokens."""
        if not self.positions:
            return {}
        return {
            "padding_fraction": 1 - self.tokens / self.positions,
            "token_imbalance": self.waited_for / self.positions,
        }


@dataclass
class StepSums:
    """Sums over some steps, with ``phase_seconds`` in the order of ``PHASES``."""

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    phase_seconds: list[float] = field(default_factory=lambda: [0.0] * len(PHASES))
    load: LoadSums = field(default_factory=LoadSums)

    def add(self, samples: int, seconds: float, phase_seconds: Sequence[float], load: Load | None = None) -> None:
        """Add one step."""
        if load is not None:
            self.load.add(load)
        self.steps += 1
        self.samples += samples
        self.seconds += seconds
        for index, value in enumerate(phase_seconds):
            self.phase_seconds[index] += value

    @property
    def throughput(self) -> float | None:
        """Samples per second; None without steps."""
        return self.samples / self.seconds if self.seconds > 0 else None

    @property
    def token_throughput(self) -> float | None:
        """Tokens per second, without padding; None without steps or without tokens."""
        return self.load.tokens / self.seconds if self.seconds > 0 and self.load.tokens else None

    @property
    def data_wait_fraction(self) -> float | None:
        """Fraction of the time in which the step waited for data, in [0, 1]; None without steps."""
        return self.phase_seconds[_DATA_WAIT] / self.seconds if self.seconds > 0 else None

    @property
    def phase_fractions(self) -> dict[str, float]:
        """Fraction of the time of each phase; they sum to 1. Empty without steps."""
        if self.seconds <= 0:
            return {}
        return {phase: value / self.seconds for phase, value in zip(PHASES, self.phase_seconds, strict=True)}

    def means(self) -> dict[str, float | None]:
        """Return mean seconds per step, in total and for each phase; None without steps."""
        names = ("step_seconds", *(f"{phase}_seconds" for phase in PHASES))
        sums = (self.seconds, *self.phase_seconds)
        return {name: value / self.steps if self.steps else None for name, value in zip(names, sums, strict=True)}


@dataclass(frozen=True)
class Totals:
    """Totals of a run so far, over all its launches.

    Attributes:
        train_seconds: Time in steps, including warm-up.
        steps: Steps measured, including warm-up.
        throughput_samples_per_second: Rate without warm-up steps; None if there were no others.
        data_wait_fraction: Likewise.
        phase_fractions: Share of each phase, likewise; empty if there were no others.
        throughput_tokens_per_second: Likewise; also None if samples have no tokens.
        comparable_steps: The latest of these steps without warm-up, all under the present conditions of the meter.
        comparable_seconds: Time in those.
    """

    train_seconds: float
    steps: int
    throughput_samples_per_second: float | None
    data_wait_fraction: float | None
    phase_fractions: Mapping[str, float] = field(default_factory=dict)
    throughput_tokens_per_second: float | None = None
    comparable_steps: int = 0
    comparable_seconds: float = 0.0
