"""Statistics of steps: the run's counters, and losses since the last record."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import torch

from paceline.data.batch import Batch, BrokenSample
from paceline.distributed.collectives import Collectives
from paceline.metrics.accumulator import Metric
from paceline.records.ledger import LedgerWriter
from paceline.trainer.noise import NoiseMeter

Results = dict[str, dict[str, float]]
"""Metric values by set of weights (``model``, ``ema``)."""


@dataclass
class Progress:
    """The run's counters; a checkpoint component.

    Attributes:
        step: Optimizer steps taken.
        skipped: Steps not taken because fp16 gradients overflowed, or a loss was not finite; their samples are still
            used up.
        nonfinite: The skipped steps whose loss or gradient norm was not finite.
        nonfinite_since: Step of the first of the consecutive latest evaluations with non-finite metrics; None if the
            latest is finite.
        resumes: How often the run was resumed.
        best: Best evaluation so far: step, position, weights, metric and value; empty before the first.
        last: Results of the last evaluation by set of weights.
        evaluations_since_best: Evaluations without a better one, for early stopping.
        broken_evaluation_ids: Evaluation samples known to be unreadable.
        earlier_seconds: Time of the run's earlier launches, up to their last save.
        begun: When this launch began, on ``time.perf_counter``'s clock.
    """

    step: int = 0
    skipped: int = 0
    nonfinite: int = 0
    nonfinite_since: int | None = None
    resumes: int = 0
    best: dict[str, Any] = field(default_factory=dict)
    last: Results = field(default_factory=dict)
    evaluations_since_best: int = 0
    broken_evaluation_ids: list[int] = field(default_factory=list)
    earlier_seconds: float = 0.0
    begun: float = field(default_factory=time.perf_counter)

    @property
    def position(self) -> int:
        """Global batches used up; the position in the data."""
        return self.step + self.skipped

    @property
    def here(self) -> dict[str, Any]:
        """The ``step`` and ``position`` of an event."""
        return {"step": self.step, "position": self.position}

    @property
    def total_seconds(self) -> float:
        """Time of all launches so far."""
        return self.earlier_seconds + self.launch_seconds

    @property
    def launch_seconds(self) -> float:
        """Time of this launch so far."""
        return time.perf_counter() - self.begun

    def advance(self, *, stepped: bool) -> None:
        """Count one global batch."""
        self.step += stepped
        self.skipped += not stepped

    def take_results(self, results: Results, metric: Metric) -> None:
        """Record an evaluation, and whether it is the best so far over all sets of weights."""
        self.last = results
        goodness = {name: _goodness(values[metric.name], metric) for name, values in results.items()}
        weights = max(goodness, key=lambda name: goodness[name])
        value = results[weights][metric.name]
        comparable = self.best and self.best["metric"] == metric.name
        is_undefined = goodness[weights] == -math.inf
        if is_undefined or (comparable and goodness[weights] <= _goodness(self.best["value"], metric)):
            self.evaluations_since_best += bool(self.best)
            return
        self.best = {**self.here, "weights": weights, "metric": metric.name, "value": value}
        self.best["results"] = results[weights]
        self.evaluations_since_best = 0

    def state_dict(self) -> dict[str, Any]:
        """The counters as plain values."""
        state = asdict(self) | {"earlier_seconds": self.total_seconds}
        del state["begun"]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load saved counters."""
        names = {each.name for each in fields(self)}
        for name in state.keys() & names:
            setattr(self, name, state[name])


def _goodness(value: float, metric: Metric) -> float:
    """Return a number that is larger for better values; non-finite values rank worst."""
    if not math.isfinite(value):
        return -math.inf
    return value if metric.higher_is_better else -value


class StepTotals(NamedTuple):
    """Data of all processes since the last record.

    Attributes:
        loss: Mean training loss; None if every step was skipped.
        broken: Newly broken samples.
        seconds: Measurements of each process, by rank.
        logged: Means of the values logged by the task, by name.
    """

    loss: float | None
    broken: list[BrokenSample]
    seconds: list[list[float]]
    logged: dict[str, float]


class Window:
    """Losses since the last step record, on this rank; a checkpoint component, so that resuming changes no record.

    Losses stay on the device until a record is due, and are then added up one by one in float64, so that the sum does
    not depend on when a checkpoint was saved.

    Args:
        collectives: The processes.
        ledger: Receives the indices of the samples.
        device: Device of the losses.
        noise: Measures the gradient noise, whose values are gathered with the losses; None to measure none.
        pop_logged: Returns the values that the task logged for the last micro-batch.

    Attributes:
        grad_norm: Gradient norm of the latest step, if it was measured.
        first_loss: Loss of the run's first micro-batch on the first rank, or of its first step if that is summed over
            the processes.
        last_loss: Training loss of the latest step record.
        worst_loss: The largest of them.
    """

    def __init__(
        self,
        collectives: Collectives,
        ledger: LedgerWriter,
        device: torch.device,
        noise: NoiseMeter | None = None,
        pop_logged: Callable[[], Mapping[str, torch.Tensor]] = dict,
    ) -> None:
        self._noise = noise
        self._earlier_noise: Mapping[str, Any] | None = None  # of launches that measured it, if this one does not
        self._pop_logged = pop_logged
        # Sum and samples by name, and the values still on the device, with the number of them from completed steps.
        self._logged: dict[str, list[float]] = {}
        self._pending_logged: list[tuple[str, torch.Tensor, int]] = []
        self._completed_logged = 0
        self._collectives = collectives
        self._ledger = ledger
        self._device = device
        self._sum = 0.0
        self._samples = 0
        self._pending: list[tuple[torch.Tensor, int]] = []
        self._completed = 0
        self._combined: list[torch.Tensor] = []
        self._gathered: list[list[Any]] = []
        self.grad_norm: torch.Tensor | None = None
        self.first_loss: float | None = None
        self.last_loss: float | None = None
        self.worst_loss = 0.0
        self.new_broken: list[BrokenSample] = []
        self.broken_ids: set[int] = set()

    def add(self, loss: torch.Tensor | None, batch: Batch) -> None:
        """Record one micro-batch: its loss, if there is one (left on the device), and the samples it used up."""
        if loss is not None:
            self._pending.append((loss.detach(), batch.weight))
        self._pending_logged += [(name, each, batch.weight) for name, each in self._pop_logged().items()]
        if batch.slice.phantom:
            return
        part, broken = batch.slice, [each.id for each in batch.broken]
        if broken:
            self.new_broken += [each for each in batch.broken if each.id not in self.broken_ids]
            self.broken_ids.update(broken)
        # What was delivered, not what was requested: a position is recorded only if the two agree.
        first = part.first if batch.ids is part.ids or np.array_equal(batch.ids, part.ids) else None
        self._ledger.append(step=part.step + 1, epoch=part.epoch, ids=batch.ids, broken=broken, first=first)

    def end_step(self, *, stepped: bool, combined: torch.Tensor | None = None) -> None:
        """Close the step; the loss of a skipped step, which may not be finite, does not count.

        Args:
            stepped: False if the optimizer did not move.
            combined: Losses and samples over all processes, [2], if they are known: the first process records them.
        """
        if not stepped or combined is not None:
            del self._pending[self._completed :]
        if not stepped:
            del self._pending_logged[self._completed_logged :]
        if stepped and combined is not None and self._collectives.world.is_first:
            self._combined.append(combined)
        self._completed, self._completed_logged = len(self._pending), len(self._pending_logged)
        if self._noise is not None:
            self._noise.end_step(self.grad_norm, stepped=stepped)

    def drain(self, seconds: Sequence[float] = ()) -> StepTotals:
        """Combine the data of all processes since the last record; waits for the device.

        Args:
            seconds: Measurements of this process; the same number of values on every process.
        """
        self._fold_pending()
        dtype = torch.float32 if self._device.type == "mps" else torch.float64
        local = [*seconds, *([] if self._noise is None else self._noise.pop_measurements())]
        world, width = self._collectives.world, len(local)
        # Zero in the others' places: a single sum then also gathers.
        measured = [0.0] * (world.rank * width) + local + [0.0] * ((world.world_size - world.rank - 1) * width)
        sums = torch.tensor(
            [self._sum, self._samples, len(self.new_broken), len(self._logged), *measured],
            dtype=dtype,
            device=self._device,
        )
        total, samples, broken, logged, *measured = self._collectives.reduce_sum(sums).tolist()
        self._sum, self._samples = 0.0, 0
        # Within one window two ranks may read the same sample, in two epochs: that is one incident.
        parts = self._collectives.gather(self.new_broken) if broken else []
        broken_samples = [each for _, each in sorted({each.id: each for part in parts for each in part}.items())]
        self.new_broken = []
        self.broken_ids.update(each.id for each in broken_samples)
        by_rank = [measured[rank * width : (rank + 1) * width] for rank in range(world.world_size)]
        if self._noise is not None:
            self._noise.average([each[len(seconds) :] for each in by_rank])
        seconds_by_rank = [each[: len(seconds)] for each in by_rank]
        if samples:
            self.last_loss = total / samples
            self.worst_loss = max(self.worst_loss, self.last_loss)
        by_name = _sums_by_name(self._collectives.gather(self._logged)) if logged else {}
        means = {name: each / count for name, (each, count) in sorted(by_name.items())}
        self._logged = {}
        return StepTotals(total / samples if samples else None, broken_samples, seconds_by_rank, means)

    def gather(self) -> None:
        """Collect every rank's sums for :meth:`state_dict`; a collective."""
        self._fold_pending()
        local = [self._sum, self._samples, [vars(each) for each in self.new_broken], sorted(self.broken_ids)]
        self._gathered = self._collectives.gather(local + [self._logged] * bool(self._logged))
        if self._noise is not None:
            self._noise.gather(self._collectives)

    def state_dict(self) -> dict[str, Any]:
        """Return every rank's sums, as last gathered."""
        state = {"ranks": self._gathered, "losses": [self.first_loss, self.last_loss, self.worst_loss]}
        noise = self._earlier_noise
        if self._noise is not None and self._noise.averages.weight:
            noise = self._noise.state_dict()
        return state if noise is None else {**state, "noise": noise}

    @staticmethod
    def losses(state: Mapping[str, Any]) -> list[float]:
        """Return each process's mean loss since the last record, from the result of :meth:`state_dict`."""
        return [losses / max(samples, 1) for losses, samples, *_ in state["ranks"]]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's sums; with another world size the first rank loads them all."""
        world, ranks = self._collectives.world, state["ranks"]
        if len(ranks) == world.world_size:
            saved = [ranks[world.rank]]
        else:
            saved = ranks if world.is_first else []
        self._sum = float(sum(each[0] for each in saved))
        self._samples = sum(each[1] for each in saved)
        self.new_broken = [BrokenSample(**broken) for each in saved for broken in each[2]]
        self.broken_ids = {sample for each in ranks for sample in each[3]}
        self._logged = _sums_by_name(each[4] for each in saved if len(each) > 4)
        self.first_loss, self.last_loss, self.worst_loss = state.get("losses", (None, None, 0.0))
        self._earlier_noise = state.get("noise")
        if self._noise is not None and self._earlier_noise is not None:
            self._noise.load_state_dict(self._earlier_noise)

    def _fold_pending(self) -> None:
        if self._combined:
            for losses, samples in torch.stack(self._combined).tolist():
                if self.first_loss is None and samples:
                    self.first_loss = losses / samples
                self._sum += losses
                self._samples += round(samples)
            self._combined = []
        if self._pending_logged:
            new = ({name: [float(each) * weight, weight]} for name, each, weight in self._pending_logged if weight)
            self._logged = _sums_by_name([self._logged, *new])
            self._pending_logged, self._completed_logged = [], 0
        if not self._pending:
            return
        values = torch.stack([loss for loss, _ in self._pending]).tolist()
        for value, (_, weight) in zip(values, self._pending, strict=True):
            # A weight of zero marks padding, whose loss may be anything.
            if self.first_loss is None and weight:
                self.first_loss = value
            self._sum += value * weight if weight else 0.0
            self._samples += weight
        self._pending, self._completed = [], 0


def _sums_by_name(parts: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Return the combined sums and samples of several parts, by name; a name need not be in every part."""
    sums: dict[str, list[float]] = {}
    for part in parts:
        for name, (value, samples) in part.items():
            total = sums.setdefault(name, [0.0, 0])
            total[0], total[1] = total[0] + value, total[1] + samples
    return sums
