"""Epochs and steps of a run whose batch may grow between epochs, and durations in steps.

An epoch has one batch size from its first step to its last. Steps are counted from the start of the run, so that the
position of a step depends only on its number and on when the size changes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import count, takewhile

from paceline.errors import RecipeError, setting_error
from paceline.parsing.units import Duration

SORTED_AT_MOST = 2**24
"""Samples of the longest epoch whose order is sorted. This takes up to 0.5 GiB in each process: two epochs' orders, and
the words that are sorted. A longer epoch's order is computed a slice at a time (``data/keyed_order.py``)."""


@dataclass(frozen=True, kw_only=True)
class BatchPhase:
    """Epochs of one batch size.

    Attributes:
        first_epoch: The first epoch, from 0.
        first_step: Steps before it.
        global_batch_size: Samples per step; an epoch's last step uses the remaining samples.
        logical_ranks: Micro-batches per step, over all processes.
        steps_per_epoch: Steps of each epoch, the smaller last one included.
    """

    first_epoch: int
    first_step: int
    global_batch_size: int
    logical_ranks: int
    steps_per_epoch: int


@dataclass(frozen=True)
class Epochs:
    """How a run's epochs are divided into steps.

    Attributes:
        samples: Samples per epoch.
        phases: The first begins with epoch 0, and each later one where the batch size changes; ascending.
    """

    samples: int
    phases: tuple[BatchPhase, ...]

    @classmethod
    def cut(cls, samples: int, sizes: Iterable[tuple[int, int, int]]) -> Epochs:
        """Divide epochs of ``samples`` by ``sizes``: (first epoch, global batch size, logical ranks), ascending."""
        phases: list[BatchPhase] = []
        for epoch, size, ranks in sizes:
            previous = phases[-1] if phases else None
            steps = (
                0
                if previous is None
                else previous.first_step + (epoch - previous.first_epoch) * previous.steps_per_epoch
            )
            phases.append(
                BatchPhase(
                    first_epoch=epoch,
                    first_step=steps,
                    global_batch_size=size,
                    logical_ranks=ranks,
                    steps_per_epoch=math.ceil(samples / size),
                )
            )
        return cls(samples, tuple(phases))

    def phase_at(self, step: int) -> BatchPhase:
        """The phase of the step numbered ``step``, from 0."""
        return self.phases[bisect_right(self.phases, step, key=lambda phase: phase.first_step) - 1]

    def phase_of_epoch(self, epoch: int) -> BatchPhase:
        """The phase of the epoch numbered ``epoch``, from 0."""
        return self.phases[bisect_right(self.phases, epoch, key=lambda phase: phase.first_epoch) - 1]

    def locate(self, step: int) -> tuple[int, int]:
        """(epoch, step within it) of the step numbered ``step``; all from 0."""
        phase = self.phase_at(step)
        epoch, offset = divmod(step - phase.first_step, phase.steps_per_epoch)
        return phase.first_epoch + epoch, offset

    def first_step(self, epoch: int) -> int:
        """Steps before the epoch numbered ``epoch``, from 0."""
        phase = self.phase_of_epoch(epoch)
        return phase.first_step + (epoch - phase.first_epoch) * phase.steps_per_epoch

    def completed(self, steps: int) -> int:
        """Complete epochs in the first ``steps`` steps."""
        return self.locate(steps)[0]

    def length(self, steps: int) -> float:
        """The first ``steps`` steps in epochs."""
        epoch, offset = self.locate(steps)
        return epoch + offset / self.phase_at(steps).steps_per_epoch

    def step_samples(self, step: int) -> int:
        """Samples in the step numbered ``step``, from 0."""
        _, offset = self.locate(step)
        size = self.phase_at(step).global_batch_size
        return min(size, self.samples - offset * size)

    def samples_before(self, step: int) -> int:
        """Samples used by the first ``step`` steps."""
        epoch, offset = self.locate(step)
        return epoch * self.samples + offset * self.phase_at(step).global_batch_size

    def last_step_samples(self, phase: BatchPhase) -> int:
        """Samples in the last step of each epoch of a phase."""
        return self.samples - (phase.steps_per_epoch - 1) * phase.global_batch_size

    def finished_phases(self, steps: int) -> list[BatchPhase]:
        """The phases in which a run of ``steps`` steps finishes an epoch."""
        return [phase for phase in self.phases if phase.first_step + phase.steps_per_epoch <= steps]

    def steps_in(self, length: Duration, total: int | None) -> int:
        """Convert a duration from the start of the run to steps: rounded; for samples, enough to use all of them.

        Raises:
            ValueError: If a percentage is used before the run's total is known.
        """
        if len(self.phases) == 1 or length.unit in ("steps", "percent"):
            size = self.phases[0].global_batch_size
            return length.to_steps(samples_per_epoch=self.samples, global_batch_size=size, total_steps=total)
        if length.unit == "samples":
            epoch, remainder = divmod(length.value, self.samples)
            return self.first_step(int(epoch)) + math.ceil(
                remainder / self.phase_of_epoch(int(epoch)).global_batch_size
            )
        part, epoch = math.modf(length.value)
        return self.first_step(int(epoch)) + round(part * self.phase_of_epoch(int(epoch)).steps_per_epoch)

    def steps_at_end(self, length: Duration, total: int) -> int:
        """Return how many last steps of a run of ``total`` span a duration: rounded; for samples, rounded up.

        This is more than ``total`` if the run is shorter.
        """
        if len(self.phases) == 1 or length.unit in ("steps", "percent"):
            return self.steps_in(length, total)
        start = (self.samples_before(total) if length.unit == "samples" else self.length(total)) - length.value
        if start < 0:
            return max(total + 1, self.steps_in(length, total))
        first = self.steps_in(Duration(start, length.unit), total)
        is_late = length.unit == "samples" and self.samples_before(first) > start
        return total - (first - 1 if is_late else first)

    def due_steps(self, every: Duration, total: int) -> tuple[int, ...]:
        """Return the steps, in a run of ``total``, after which an interval is due; empty for a fixed number of steps.

        The number is not fixed where the batch changes, or where an epoch or a percentage is not a whole number of
        steps: a sum of rounded intervals would drift. Samples are rounded up to a fixed number of steps.
        """
        units = {"steps": Fraction(1), "percent": Fraction(total, 100), "samples": Fraction(0)}
        is_fixed = len(self.phases) == 1 or every.unit in ("steps", "percent")
        unit = units.get(every.unit, Fraction(self.phases[0].steps_per_epoch))
        if is_fixed and (unit * Fraction(str(every.value))).denominator == 1:
            return ()
        multiples = (self.steps_in(Duration(every.value * times, every.unit), total) for times in count(1))
        return tuple(dict.fromkeys(takewhile(lambda step: step <= total, multiples)))

    def total(self, duration: Duration) -> int:
        """Return the steps of the whole run.

        Raises:
            RecipeError: If it has no steps, or its duration is a percentage.
        """
        try:
            return self._at_least_one("train.duration", duration, None)
        except ValueError as error:
            message = f"train.duration: {error}; give epochs, steps or samples."
            raise RecipeError(message, key="train.duration", value=duration) from None

    def steps_within(self, key: str, length: Duration, total: int, *, at_end: bool = False) -> int:
        """Return the steps of a duration that must fit into the run.

        Raises:
            RecipeError: If it does not.
        """
        steps = self.steps_at_end(length, total) if at_end else self.steps_in(length, total)
        if steps > total:
            problem = f"is {steps} steps, longer than the run's {total}; shorten it, or lengthen train.duration."
            raise setting_error(key, length, problem)
        return steps

    def interval(self, key: str, length: Duration | None, total: int) -> int | None:
        """Return the steps of an interval; None if it is off.

        Raises:
            RecipeError: If the interval is less than one step.
        """
        return None if length is None else self._at_least_one(key, length, total)

    def _at_least_one(self, key: str, length: Duration, total: int | None) -> int:
        steps = self.steps_in(length, total)
        if steps < 1:
            raise setting_error(key, length, "is less than one step; give at least '1 steps'.")
        return steps
