"""Confidence intervals of a few measurements.

Everything here is for small samples: three rounds are typical, a hundred are many. A single value says nothing about
the spread, so its interval is unbounded.

SciPy is imported on use: every training run imports this module, but few compute an interval.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_LARGEST_LOGARITHM = math.log(np.finfo(np.float64).max)


@dataclass(frozen=True)
class Interval:
    """A value with its confidence interval.

    Attributes:
        middle: The estimate.
        low: Lower end; if unbounded, ``-inf``, or 0 for a quantity that cannot be negative.
        high: Upper end; ``inf`` if unbounded.
        count: Number of measurements.
        confidence: Confidence level, in (0, 1).
    """

    middle: float
    low: float
    high: float
    count: int
    confidence: float = 0.95

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def to_json(self) -> dict[str, float]:
        """Return the interval as one JSON object."""
        return {"middle": self.middle, "low": self.low, "high": self.high, "count": self.count}


def mean_interval(values: Sequence[float] | Floats, *, confidence: float = 0.95) -> Interval:
    """Return the mean with Student's interval.

    Its coverage is exact for independent normal values and close for other independent values.

    Args:
        values: Measurements, one or more.
        confidence: In (0, 1).

    Raises:
        ValueError: If there is no measurement, or one is not finite.

    Source: "Student" (1908), The probable error of a mean.
    """
    from scipy.special import stdtrit

    numbers = _checked(values, confidence)
    middle = float(numbers.mean())
    if len(numbers) < 2:
        return Interval(middle, -math.inf, math.inf, len(numbers), confidence)
    error = float(numbers.std(ddof=1)) / math.sqrt(len(numbers))
    half = float(stdtrit(len(numbers) - 1, (1 + confidence) / 2)) * error
    return Interval(middle, middle - half, middle + half, len(numbers), confidence)


def rate_interval(seconds: Sequence[float] | Floats) -> Interval:
    """Rate per second from durations: the reciprocal of the mean time and of its 95 % interval.

    Not the mean of rates, which would weigh slow seconds less than fast ones. ``high`` is ``inf`` if the times are too
    few or too different to bound their mean away from zero.

    Args:
        seconds: Positive measurements, one or more.

    Raises:
        ValueError: If there is no measurement, or one is not positive.
    """
    _logarithms(seconds)
    interval = mean_interval(seconds)
    low = 0.0 if math.isinf(interval.high) else 1 / interval.high
    high = 1 / interval.low if interval.low > 0 else math.inf
    return replace(interval, middle=1 / interval.middle, low=low, high=high)


def paired_ratio(candidate: Sequence[float], baseline: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Candidate over baseline for paired rounds: whatever slows a whole round slows both and cancels.

    Returns the geometric mean of the rounds' ratios, with Student's interval on their logarithms, since the ratios 2
    and 1/2 are equally far from 1. The ratios must be independent. Machine drift preserves this if the order alternates
    from round to round: a steady drift then only widens the interval. A disturbed round widens it too; no round is
    discarded. With two rounds the interval is 13 times as wide as their difference suggests, with three rounds 4 times.
    So more rounds help more than longer ones.

    Args:
        candidate: One positive measurement for each round.
        baseline: One positive measurement of the baseline for each of the same rounds.
        confidence: In (0, 1).

    Raises:
        ValueError: If there are no rounds, the counts differ, or a measurement is not positive.
    """
    if len(candidate) != len(baseline):
        raise ValueError(f"{len(candidate)} rounds of one and {len(baseline)} of the other cannot be paired")
    return _exponential(mean_interval(_logarithms(candidate) - _logarithms(baseline), confidence=confidence))


def unpaired_ratio(candidate: Sequence[float], baseline: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Candidate over baseline for separate measurements; their variances may differ (Welch).

    The interval cannot include differences in the machine's state between the two times.

    Args:
        candidate: Positive measurements.
        baseline: Positive measurements; their number may differ.
        confidence: In (0, 1).

    Raises:
        ValueError: If a side has no measurements, or a measurement is not positive.

    Source: Welch (1947), The generalization of "Student's" problem when several different population variances are
    involved; degrees of freedom by Satterthwaite (1946).
    """
    from scipy.special import stdtrit

    first, second = _checked(_logarithms(candidate), confidence), _checked(_logarithms(baseline), confidence)
    count, middle = min(len(first), len(second)), float(first.mean() - second.mean())
    if count < 2:
        return _exponential(Interval(middle, -math.inf, math.inf, count, confidence))
    parts = [float(each.var(ddof=1)) / len(each) for each in (first, second)]
    variance = sum(parts)
    if variance == 0:
        return _exponential(Interval(middle, middle, middle, count, confidence))
    freedom = variance**2 / sum(part**2 / (len(each) - 1) for part, each in zip(parts, (first, second), strict=True))
    half = float(stdtrit(freedom, (1 + confidence) / 2)) * math.sqrt(variance)
    return _exponential(Interval(middle, middle - half, middle + half, count, confidence))


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest measured value that at least this share of the values do not exceed (nearest rank).

    Does not interpolate. With fewer than ``1 / (1 - share)`` values it is the largest.

    Args:
        values: Measurements, one or more.
        share: In (0, 1]; 0.99 is the 99th percentile.

    Raises:
        ValueError: If there is no measurement, or the share is not in (0, 1].
    """
    if not 0 < share <= 1:
        raise ValueError(f"found {share} as a share, but it must be in (0, 1]")
    numbers = np.sort(_checked(values, 0.5))
    # Tolerates binary rounding: otherwise 0.95 * 20 = 19.000000000000004 would give rank 20.
    return float(numbers[max(0, math.ceil(share * len(numbers) - 1e-9) - 1)])


def part_means(values: Sequence[float]) -> list[float]:
    """Means of ten consecutive parts of a series; fewer parts if there are fewer values.

    Consecutive measurements are correlated, and an interval that assumes independence is too narrow. Means over long
    parts are nearly independent (the method of batch means).

    Args:
        values: Measurements in order, one or more.
    """
    parts = min(10, len(values))
    bounds = [round(part * len(values) / parts) for part in range(parts + 1)]
    return [statistics.fmean(values[begin:end]) for begin, end in pairwise(bounds)]


def share_interval(hits: int, trials: int, *, confidence: float = 0.95) -> Interval:
    """Return the success rate of trials with its exact interval.

    Args:
        hits: Number of successes.
        trials: Number of trials, at least one.
        confidence: In (0, 1).

    Raises:
        ValueError: If there are no trials, or fewer trials than hits.

    Source: Clopper and Pearson (1934), The use of confidence or fiducial limits illustrated in the
    case of the binomial.
    """
    from scipy.special import betaincinv

    if not 0 <= hits <= trials or trials < 1:
        raise ValueError(f"{hits} of {trials} is not a share")
    tail = (1 - confidence) / 2
    low = 0.0 if hits == 0 else float(betaincinv(hits, trials - hits + 1, tail))
    high = 1.0 if hits == trials else float(betaincinv(hits + 1, trials - hits, 1 - tail))
    return Interval(hits / trials, low, high, trials, confidence)


@dataclass(frozen=True)
class TimeToEvent:
    """Time until an event, with right-censored observations.

    Attributes:
        median: The time by which half have reached the event; ``inf`` if fewer than half were observed to.
        reached: The share observed to reach the event.
        restarting: Mean time to success if failures restart: total time divided by successes; ``inf`` without
            successes.
        curve: The Kaplan-Meier survival share after each event time.
    """

    median: Interval
    reached: Interval
    restarting: float
    curve: tuple[tuple[float, float], ...]


def time_to_event(times: Sequence[float], reached: Sequence[bool]) -> TimeToEvent:
    """Estimate the time to an event from right-censored observations.

    Dropping censored observations would favour methods that often fail. The Kaplan-Meier estimator counts each for as
    long as it was observed. The interval of the median contains the times at which the estimate does not differ
    significantly from one half on the log(-log) scale, which suits small samples better than the plain scale.

    Args:
        times: Event time, or observation time if censored; positive.
        reached: Whether the event was observed.

    Raises:
        ValueError: If there are no times, one is not positive, or the lengths differ.

    Source: Kaplan and Meier (1958), Nonparametric estimation from incomplete observations; Brookmeyer and Crowley
    (1982), A confidence interval for the median survival time; Greenwood (1926) for the variance.
    """
    from scipy.stats import CensoredData, ecdf

    if len(times) != len(reached):
        raise ValueError(f"{len(times)} times and {len(reached)} outcomes do not belong together")
    numbers = _checked(times, 0.95)
    if numbers.min() <= 0:
        raise ValueError(f"found the time {numbers.min()}, but times are positive")
    observed = np.asarray(reached, dtype=bool)
    estimate = ecdf(CensoredData.right_censored(numbers, ~observed)).sf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # if all reached the event, the variance is undefined
        band = estimate.confidence_interval(0.95, method="log-log")
    # Event times only: after the last one the variance is unknown, so it bounds nothing.
    is_event = np.isin(estimate.quantiles, numbers[observed])
    events, shares = estimate.quantiles[is_event], estimate.probabilities[is_event]

    def first(where: NDArray[np.bool_], otherwise: float) -> float:
        return float(events[where.argmax()]) if where.any() else otherwise

    median = Interval(
        first(shares <= 0.5, math.inf),
        first(~(band.low.probabilities[is_event] > 0.5), 0.0),
        first(band.high.probabilities[is_event] < 0.5, math.inf),
        len(numbers),
    )
    successes = int(observed.sum())
    return TimeToEvent(
        median=median,
        reached=share_interval(successes, len(numbers)),
        restarting=float(numbers.sum()) / successes if successes else math.inf,
        curve=tuple(zip(events.tolist(), shares.tolist(), strict=True)),
    )


def _exponential(interval: Interval) -> Interval:
    high = math.inf if interval.high > _LARGEST_LOGARITHM else math.exp(interval.high)
    return Interval(math.exp(interval.middle), math.exp(interval.low), high, interval.count, interval.confidence)


def _logarithms(values: Sequence[float] | Floats) -> Floats:
    numbers = np.asarray(values, dtype=np.float64)
    if not (numbers > 0).all():
        raise ValueError("a ratio is of positive numbers")
    return np.log(numbers)


def _checked(values: Sequence[float] | Floats, confidence: float) -> Floats:
    numbers = np.asarray(values, dtype=np.float64)
    if not 0 < confidence < 1:
        raise ValueError(f"found {confidence} as confidence, but it must be in (0, 1)")
    if not numbers.size or not np.isfinite(numbers).all():
        raise ValueError("an interval is of one or more finite numbers")
    return numbers
