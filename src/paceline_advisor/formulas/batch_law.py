"""The law of steps to a target as a function of batch size: its fit, its knee, and their intervals.

There is one law in three forms. With S steps and E = B S examples to a target,

    (S / S_min - 1) (E / E_min - 1) = 1,   S = S_min (1 + B_crit / B),   E = E_min (1 + B / B_crit),

where B_crit = E_min / S_min. Divided by the samples of an epoch, the third form is the law of epochs against the batch,
epochs = epochs_min (1 + B / B_crit). The law is fitted to logarithms, since the number of steps varies by a few percent
at any batch size. A run that ended before it reached the target is a censored observation: it needs at least that many
steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, minimize, minimize_scalar
from scipy.special import log_ndtr, stdtrit

from paceline.metrics.critical_batch import steps_ratio
from paceline.metrics.intervals import Interval
from paceline_advisor import frozen

Floats = NDArray[np.float64]

# The knee is searched from the smallest batch divided by this factor to the largest batch times it. Beyond that, the
# data cannot distinguish it from no knee.
_BEYOND = 1000.0
_GRID = 121
FEWEST_BATCHES = 3
FEWEST_RUNS = 4
_LEAST_SPREAD = 1e-9
_CONFIDENCE = 0.95  # as that of an Interval
_LARGEST_LOGARITHM = math.log(np.finfo(np.float64).max)


@dataclass(frozen=True)
class SweepPoint:
    """One run of a sweep.

    Attributes:
        batch: Samples in a step.
        steps: Optimizer steps to the target, or until the run ended.
        reached: Whether it reached the target.
    """

    batch: float
    steps: float
    reached: bool = True


@frozen
class BatchLaw:
    """The law, fitted.

    Attributes:
        fewest_steps: S_min in steps; its interval, like the next one, comes from the law linearised around the fit.
        fewest_examples: E_min in samples.
        critical_batch: The knee B_crit in samples, with a profile-likelihood interval. ``low`` is 0, or ``high`` is
            infinite, if the tested batches do not bound the knee on that side. ``middle`` is 0 or infinite too if a law
            without a knee is the most likely.
        spread: Standard deviation of the natural logarithm of a run's steps around the law: 0.1 is about 10 %.
        worst: The largest relative deviation from the law of the mean of one batch's runs, as a fraction.
    """

    fewest_steps: Interval
    fewest_examples: Interval
    critical_batch: Interval
    spread: float
    worst: float

    def steps(self, batch: float) -> float:
        """Return the steps to the target with a batch, in samples."""
        if math.isinf(self.critical_batch.middle):
            return self.fewest_examples.middle / batch  # without a knee, steps are inversely proportional to the batch
        return self.fewest_steps.middle * steps_ratio(self.critical_batch.middle, batch)

    def examples(self, batch: float) -> float:
        """Return the samples to the target with a batch."""
        return batch * self.steps(batch)

    def to_json(self) -> dict[str, object]:
        """The law as one JSON object."""
        return {
            "law": "(S/S_min - 1)(E/E_min - 1) = 1; epochs = epochs_min (1 + B/B_crit)",
            **vars(self),
        }


def why_no_law(points: Sequence[SweepPoint]) -> str:
    """Return why a law cannot be fitted to runs; empty if it can."""
    batches = {each.batch for each in points if each.reached}
    runs = sum(each.reached for each in points)
    if len(batches) < FEWEST_BATCHES:
        return f"the target was reached with {len(batches)} batch sizes, and a knee needs {FEWEST_BATCHES} or more"
    if runs < FEWEST_RUNS:
        return f"the target was reached by {runs} runs, and an interval needs {FEWEST_RUNS} or more"
    return ""


def fit_batch_law(points: Sequence[SweepPoint]) -> BatchLaw:
    """Fit the law by maximum likelihood; if all runs reached the target, this is least squares of logarithms.

    Args:
        points: The runs. At least four must have reached the target, with at least three batch sizes.

    Raises:
        ValueError: If the points are too few; see :func:`why_no_law`.

    Source: McCandlish et al., arXiv:1812.06162, equations 2.11 and 2.12; for the interval of the knee, the likelihood
    ratio in its exact form for normal errors, F(1, n - 2).
    """
    if why := why_no_law(points):
        raise ValueError(f"no law can be fitted: {why}")
    fit = _Fit(points)
    best, knee = fit.knee()
    mean, spread = fit.at(best)[1:]
    half = fit.half_widths(best, spread)
    return BatchLaw(
        fewest_steps=_around(mean, half[0], fit.count),
        fewest_examples=_around(mean + best, half[1], fit.count),
        critical_batch=knee,
        spread=spread,
        worst=fit.worst(best, mean),
    )


class _Fit:
    """The likelihood of runs as a function of the knee, with the other two parameters optimised."""

    def __init__(self, points: Sequence[SweepPoint]) -> None:
        reached = np.array([each.reached for each in points])
        logs = np.log(np.array([each.steps for each in points], dtype=np.float64))
        batches = np.array([each.batch for each in points], dtype=np.float64)
        self._logs, self._batches = logs[reached], batches[reached]
        self._ended_logs, self._ended_batches = logs[~reached], batches[~reached]
        self.count = len(self._logs)
        self._quantile = float(stdtrit(self.count - 2, (1 + _CONFIDENCE) / 2))
        self._bounds = (math.log(batches.min() / _BEYOND), math.log(batches.max() * _BEYOND))

    def at(self, knee: float) -> tuple[float, float, float]:
        """Return minus the log-likelihood, the best logarithm of S_min, and the spread, for a logarithm of the knee."""
        shape = np.logaddexp(0, knee - np.log(self._batches))
        rest = self._logs - shape
        mean = float(rest.mean())
        spread = max(math.sqrt(float(((rest - mean) ** 2).mean())), _LEAST_SPREAD)
        if not len(self._ended_logs):
            return self.count * (math.log(spread) + 0.5), mean, self._unbiased(spread)
        ended = self._ended_logs - np.logaddexp(0, knee - np.log(self._ended_batches))

        def cost(given: Floats) -> float:
            at, logarithm = (float(each) for each in given)
            width = math.exp(logarithm)
            normal = float((((rest - at) / width) ** 2).sum()) / 2 + self.count * logarithm
            # The probability that a censored run takes longer than it was observed.
            return normal - float(log_ndtr((at - ended) / width).sum())

        found = minimize(cost, np.array([mean, math.log(spread)]), method="Nelder-Mead", options={"xatol": 1e-6})
        return float(found.fun), float(found.x[0]), self._unbiased(math.exp(found.x[1]))

    def _unbiased(self, spread: float) -> float:
        return spread * math.sqrt(self.count / (self.count - 2))

    def knee(self) -> tuple[float, Interval]:
        """Return the logarithm of the most likely knee, and the knee with its interval."""
        grid = np.linspace(*self._bounds, _GRID)
        costs = np.array([self.at(float(each))[0] for each in grid])
        index = int(costs.argmin())
        best, least = float(grid[index]), float(costs[index])
        if 0 < index < _GRID - 1:
            near = (float(grid[index - 1]), float(grid[index + 1]))
            found = minimize_scalar(lambda knee: self.at(knee)[0], bounds=near, method="bounded")
            best, least = float(found.x), float(found.fun)
        # The F test of least squares; with censored runs, the same correction for few runs.
        allowed = least + self.count / 2 * math.log1p(self._quantile**2 / (self.count - 2))

        def beyond(knee: float) -> float:
            return self.at(knee)[0] - allowed

        low = _crossing(beyond, best, grid[grid < best][::-1])
        high = _crossing(beyond, best, grid[grid > best])
        middle = 0.0 if index == 0 else math.inf if index == _GRID - 1 else math.exp(best)
        ends = (0.0 if low is None else math.exp(low), math.inf if high is None else math.exp(high))
        return best, Interval(middle, *ends, self.count)

    def half_widths(self, knee: float, spread: float) -> tuple[float, float]:
        """Return the half-widths of the intervals of the logarithms of S_min and E_min."""
        slope = math.exp(knee) / (math.exp(knee) + self._batches)
        jacobian = np.stack([np.ones_like(slope), slope], axis=1)
        information = jacobian.T @ jacobian
        if np.linalg.cond(information) > 1 / np.finfo(np.float64).eps:
            return math.inf, math.inf
        covariance = np.linalg.inv(information) * spread**2
        of_steps, of_examples = float(covariance[0, 0]), max(float(covariance.sum()), 0.0)
        return self._quantile * math.sqrt(of_steps), self._quantile * math.sqrt(of_examples)

    def worst(self, knee: float, mean: float) -> float:
        """Return the largest relative deviation from the law of the mean of one batch's runs."""
        off = self._logs - mean - np.logaddexp(0, knee - np.log(self._batches))
        means = [float(off[self._batches == batch].mean()) for batch in np.unique(self._batches)]
        return max(abs(math.expm1(each)) for each in means)


def _crossing(beyond: Callable[[float], float], best: float, outwards: Floats) -> float | None:
    """Return where the likelihood falls below the threshold on one side; None if it does not."""
    inside = best
    for each in outwards.tolist():
        if beyond(each) > 0:
            return float(brentq(beyond, inside, each, xtol=1e-6))
        inside = each
    return None


def _around(logarithm: float, half: float, count: int) -> Interval:
    # If the batches do not determine one of the two, its upper end may be too large for a float.
    high = math.inf if logarithm + half > _LARGEST_LOGARITHM else math.exp(logarithm + half)
    return Interval(math.exp(logarithm), math.exp(logarithm - half), high, count)
