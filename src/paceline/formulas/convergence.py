"""Do runs converge as a reference does, at their batch size? MLPerf's reference convergence points.

A run that needs fewer epochs than the reference's runs has something that they have not: another optimizer, other
data, or luck. MLPerf compares the mean of a submission's runs, without the fastest and the slowest, with what is
probable of runs that are drawn as the reference's are; and scales the time of those that are a little too fast.

Source:
    mlcommons/logging, mlperf_logging/rcp_checker (rules and numbers); MLCommons, training_policies,
    training_rules.adoc, appendix on reference convergence points.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import stdtrit

from paceline.formulas.mlperf import olympic_mean

RESNET_RUNS = 5
"""Runs that a result of ResNet-50 is made of; a reference point has twice as many or more."""
_CONFIDENCE = 0.95

# mlcommons/logging@0a0a659: mlperf_logging/rcp_checker/training_4.0.0/rcps_resnet.json, epochs to 75.9 % by batch.
# fmt: off
RESNET_EPOCHS: Mapping[int, tuple[float, ...]] = {
    1632: (34, 34, 34, 35, 35, 37, 35, 35, 33, 35, 35, 37, 37, 35, 35, 34, 35),
    3264: (36, 35, 34, 34, 36, 35, 35, 35, 35, 37, 35, 35, 35, 36, 35),
    4096: (39, 42, 40, 41, 39, 40, 41, 39, 40, 39),
    8192: (42, 44, 43, 41, 41, 41, 42, 42, 43, 41),
    13056: (46, 46, 44, 46, 45, 46, 45, 45, 45, 46),
    32768: (56, 56, 55, 56, 56, 56, 56, 56, 57, 56),
    49152: (68, 68, 68, 68, 69, 68, 68, 67, 69, 67),
    58880: (80, 81, 80, 78, 80, 80, 81, 79, 80, 80),
    65536: (83, 85, 84, 86, 85, 85, 83, 84, 85, 85),
    67840: (
        86, 87, 86, 87, 86, 85, 86, 86, 86, 85, 86, 86, 86, 86,
        86, 85, 86, 86, 87, 85, 85, 86, 85, 87, 86, 85, 85, 86,
    ),
}
# fmt: on


@dataclass(frozen=True, kw_only=True)
class ReferencePoint:
    """How the reference's runs converge at one batch size.

    Attributes:
        global_batch_size: Samples per step.
        mean_epochs: Epochs to the target, the fastest and the slowest run left out.
        deviation: Standard deviation of the epochs of all runs.
        runs: Runs that count; of a point between two others, those that it would have.
    """

    global_batch_size: int
    mean_epochs: float
    deviation: float
    runs: int

    def least_epochs(self, submitted: int = RESNET_RUNS) -> float:
        """The smallest mean of so many runs, of which two are left out, that a one-sided t-test at 5 % lets pass."""
        count = submitted - 2
        quantile = float(stdtrit(self.runs + count - 2, _CONFIDENCE))
        return self.mean_epochs - quantile * self.deviation * math.sqrt(1 / self.runs + 1 / count)


def reference_points(epochs: Mapping[int, Sequence[float]]) -> list[ReferencePoint]:
    """Points from the epochs of runs by global batch size, ascending.

    Raises:
        ValueError: If a batch size has fewer than three runs.
    """
    return [
        ReferencePoint(
            global_batch_size=batch,
            mean_epochs=olympic_mean(epochs[batch]),
            deviation=float(np.std(epochs[batch])),
            runs=len(epochs[batch]) - 2,
        )
        for batch in sorted(epochs)
    ]


def pruned(points: Sequence[ReferencePoint]) -> list[ReferencePoint]:
    """Points without those that others show to be slow: below the fastest, or above the line between neighbours."""
    fastest = min(points, key=lambda each: each.mean_epochs).global_batch_size
    kept = [each for each in points if each.global_batch_size >= fastest]
    at = 1
    while at < len(kept) - 1:
        if kept[at].mean_epochs > between(kept[at - 1], kept[at + 1], kept[at].global_batch_size).mean_epochs:
            del kept[at]
        else:
            at += 1
    return kept


def between(low: ReferencePoint, high: ReferencePoint, global_batch_size: int) -> ReferencePoint:
    """The point on the straight line between two others."""
    sizes = (low.global_batch_size, high.global_batch_size)
    return ReferencePoint(
        global_batch_size=global_batch_size,
        mean_epochs=float(np.interp(global_batch_size, sizes, (low.mean_epochs, high.mean_epochs))),
        deviation=float(np.interp(global_batch_size, sizes, (low.deviation, high.deviation))),
        runs=2 * RESNET_RUNS,
    )


Outcome = Literal["found", "interpolated", "slower than the smallest", "missing", "too few arrived"]


@dataclass(frozen=True, kw_only=True)
class Convergence:
    """Runs beside the reference.

    Attributes:
        outcome: Whether the batch size has a point, lies between two, is smaller than all and was held against the
            smallest, or is larger than all, so that there is nothing to hold it against; or that more than one run did
            not arrive.
        mean_epochs: Of the runs, the fastest and the slowest left out.
        point: What they were held against.
        least_epochs: The fewest that pass; NaN without a point.
        passed: Whether they do not converge faster than the reference's runs may.
        scaling: By what a time would be multiplied, for having needed fewer epochs than the reference; 1 at least.
    """

    outcome: Outcome
    mean_epochs: float
    point: ReferencePoint | None
    least_epochs: float
    passed: bool
    scaling: float


def compare(points: Sequence[ReferencePoint], global_batch_size: int, epochs: Sequence[float]) -> Convergence:
    """Hold runs against reference points.

    Args:
        points: Of the reference, :func:`pruned` as MLPerf does it.
        global_batch_size: Of the runs.
        epochs: What each needed to the target; infinite for one that did not arrive.

    Raises:
        ValueError: If there are fewer than three runs, or no points.
    """
    mean = olympic_mean(epochs)
    outcome, point = _point_for(points, global_batch_size)
    if math.isinf(mean):
        outcome, point = "too few arrived", None
    if point is None:
        return Convergence(
            outcome=outcome, mean_epochs=mean, point=None, least_epochs=math.nan, passed=False, scaling=1.0
        )
    least = point.least_epochs()
    passed = mean >= least
    if outcome == "slower than the smallest" and not passed:
        outcome = "missing"
    scaling = max(1.0, point.mean_epochs / mean)
    return Convergence(
        outcome=outcome, mean_epochs=mean, point=point, least_epochs=least, passed=passed, scaling=scaling
    )


def _point_for(points: Sequence[ReferencePoint], size: int) -> tuple[Outcome, ReferencePoint | None]:
    if not points:
        raise ValueError("there are no reference points")
    below = [each for each in points if each.global_batch_size < size]
    above = [each for each in points if each.global_batch_size > size]
    exact = next((each for each in points if each.global_batch_size == size), None)
    if exact is not None:
        return "found", exact
    if below and above:
        return "interpolated", between(below[-1], above[0], size)
    return ("missing", None) if below else ("slower than the smallest", above[0])
