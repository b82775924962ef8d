"""How far is the run? The few numbers that, with the recipe, determine everything that follows."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from paceline.metrics.accumulator import Metric

Results = dict[str, dict[str, float]]
"""Metric values by set of weights (``model``, ``ema``)."""


@dataclass
class Progress:
    """The run's counters; a checkpoint component.

    Attributes:
        step: Optimizer steps taken.
        skipped: Steps not taken because fp16 gradients overflowed, or a loss was no number; their samples are used up
            all the same.
        nonfinite: Of these, those where a loss, or a gradient's norm, was no number.
        nonfinite_since: Step of the first of the latest evaluations whose metrics were not finite; None if they are.
        resumes: How often the run was continued.
        best: Best evaluation so far: step, position, weights, metric and value; empty before the first.
        last: Results of the last evaluation by set of weights.
        evaluations_since_best: Evaluations without a better one, for early stopping.
        broken_evaluation_ids: Evaluation samples known to be unreadable.
        earlier_seconds: Time the run's earlier launches took, as far as it was saved.
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
        """Where an event happens: its ``step`` and ``position``."""
        return {"step": self.step, "position": self.position}

    @property
    def total_seconds(self) -> float:
        """Time all launches took up to now."""
        return self.earlier_seconds + self.launch_seconds

    @property
    def launch_seconds(self) -> float:
        """Time this launch took up to now."""
        return time.perf_counter() - self.begun

    def advance(self, *, stepped: bool) -> None:
        """Count one global batch."""
        if stepped:
            self.step += 1
        else:
            self.skipped += 1

    def take_results(self, results: Results, metric: Metric) -> None:
        """Note an evaluation, and whether it is the best so far over all sets of weights."""
        self.last = results
        goodness = {name: _goodness(values[metric.name], metric) for name, values in results.items()}
        weights = max(goodness, key=lambda name: goodness[name])
        value = results[weights][metric.name]
        comparable = self.best and self.best["metric"] == metric.name
        if comparable and goodness[weights] <= _goodness(self.best["value"], metric):
            self.evaluations_since_best += 1
            return
        self.best = {
            **self.here,
            "weights": weights,
            "metric": metric.name,
            "value": value,
            "results": results[weights],
        }
        self.evaluations_since_best = 0

    def state_dict(self) -> dict[str, Any]:
        """The counters as plain values."""
        state = asdict(self) | {"earlier_seconds": self.total_seconds}
        del state["begun"]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over saved counters."""
        known = {each.name for each in fields(self)}
        for name in state.keys() & known:
            setattr(self, name, state[name])


def _goodness(value: float, metric: Metric) -> float:
    """A number that is larger for better values; what is no number is worst."""
    if math.isnan(value):
        return -math.inf
    return value if metric.higher_is_better else -value
