"""What came of looking at the landscape of one run, or of several?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline_advisor.landscape.curvature import Eigenvalue
from paceline_advisor.landscape.sharpness import Sharpness
from paceline_advisor.landscape.surface import Curve, Surface


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """A run's way, in the plane that holds most of it.

    Attributes:
        steps: Of the checkpoints, in order.
        coordinates: Where each is in the plane, the last at (0, 0); in the weights' own lengths.
        explained: Share of the squared distances from the last weights that lies along each axis.
        surface: The loss on the plane.
    """

    steps: tuple[int, ...]
    coordinates: tuple[tuple[float, float], ...]
    explained: tuple[float, float]
    surface: Surface


@dataclass(frozen=True, kw_only=True)
class RunLandscape:
    """One run.

    Attributes:
        run: What was named.
        path: The weights.
        weights: ``model`` or ``ema``.
        steps: Optimizer steps behind them.
        parameters: Numbers among them.
        batch_size: Samples per step.
        peak_lr: Peak learning rate.
        results: By split, each metric as evaluation has it (with stored statistics).
        gap: What the task is judged by (accuracy in points, say) on the training samples less that on the validation
            samples; the metric is ``gap_metric``. None where that is the loss.
        gap_metric: The task's headline.
        curve: Along the first random direction.
        surface: Along the first two.
        trajectory: If there was one to draw.
        sharpness: One for each epsilon.
        curvature: The largest eigenvalue of the Hessian.
    """

    run: Path
    path: Path
    weights: str
    steps: int
    parameters: int
    batch_size: int
    peak_lr: float
    results: Mapping[str, Mapping[str, float]]
    gap: float | None = None
    gap_metric: str | None = None
    curve: Curve | None = None
    surface: Surface | None = None
    trajectory: Trajectory | None = None
    sharpness: tuple[Sharpness, ...] = ()
    curvature: Eigenvalue | None = None


@dataclass(frozen=True, kw_only=True)
class Line:
    """The straight way from the first run's weights (0) to the second's (1).

    Attributes:
        curves: By split.
        barrier: How far the loss rises above the line between the two losses, by split; NaN where a loss is none.
    """

    curves: Mapping[str, Curve]
    barrier: Mapping[str, float]

    def in_words(self) -> str:
        """The barrier as one sentence."""
        known = ", ".join(f"{rise:.4g} ({on})" for on, rise in self.barrier.items() if not math.isnan(rise))
        odd = " and ".join(on for on, rise in self.barrier.items() if math.isnan(rise))
        said = [f"the loss rises above the line between the two by {known}"] if known else []
        said += [f"how far it rises is not known for {odd}: the loss is no number somewhere on the way"] if odd else []
        return "; ".join(said)


@dataclass(frozen=True, kw_only=True)
class LandscapeReport:
    """Everything.

    Attributes:
        split: Whose loss the curves, surfaces, sharpness and curvature are of.
        samples: Samples of each split.
        batch_norm: Where BatchNorm's statistics came from: ``recomputed``, ``stored``, or ``none``.
        seed: Of directions, starts and samples.
        runs: One for each.
        line: Between two runs.
        notes: What else the user should know.
    """

    split: str
    samples: Mapping[str, int]
    batch_norm: str
    seed: int
    runs: tuple[RunLandscape, ...]
    line: Line | None = None
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def not_finite(*parts: Curve | Surface | None) -> tuple[int, int]:
    """How many points of some curves and surfaces have a loss that is no number, and how many there are."""
    losses = [loss for part in parts if part is not None for loss in _losses(part)]
    return sum(not math.isfinite(loss) for loss in losses), len(losses)


def _losses(part: Curve | Surface) -> Iterator[float]:
    first = next(iter(part.values.values()))
    for each in first:
        yield from each if isinstance(each, tuple) else (each,)
