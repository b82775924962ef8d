"""Confidence intervals of a few measurements.

Everything here is for small samples: three rounds are usual, a hundred are many. With one value there is no telling how
much the next would differ, and its interval is everything there is.

SciPy is loaded where it is used: every training imports this module, and hardly one asks for an interval.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
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
        low: Its lower end; ``-inf``, or 0 of what cannot be negative, if nothing bounds it.
        high: Its upper end; ``inf`` if nothing bounds it.
        count: Measurements it is made of.
        confidence: In (0, 1).
    """

    middle: float
    low: float
    high: float
    count: int
    confidence: float = 0.95

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def to_json(self) -> dict[str, float]:
        """The interval as one JSON object."""
        return {"middle": self.middle, "low": self.low, "high": self.high, "count": self.count}


def mean_interval(values: Sequence[float] | Floats, *, confidence: float = 0.95) -> Interval:
    """The mean with Student's interval.

    Its coverage is exact for normal values and holds well for others, as long as they are drawn independently.

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


def rate_interval(seconds: Sequence[float] | Floats, *, confidence: float = 0.95) -> Interval:
    """How many happen in a second, by how long one takes: one over the mean time, and over the ends of its interval.

    Not the mean of rates: that would count a slow second for less than a fast one. ``high`` is ``inf`` where the times
    are so few, or so different, that their mean may be anything.

    Args:
        seconds: Positive measurements, one or more.
        confidence: In (0, 1).

    Raises:
        ValueError: If there is no measurement, or one is not positive.
    """
    _logarithms(seconds)
    found = mean_interval(seconds, confidence=confidence)
    low = 0.0 if math.isinf(found.high) else 1 / found.high
    return Interval(1 / found.middle, low, 1 / found.low if found.low > 0 else math.inf, found.count, confidence)


def paired_ratio(candidate: Sequence[float], baseline: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Candidate over baseline, for measurements taken in turns: what slows a whole round slows both, and cancels.

    The geometric mean of the rounds' ratios with Student's interval on their logarithms: of ratios, 2 and 1/2 are
    equally far from 1. It asks that the rounds' ratios be drawn independently. A drift of the machine leaves them so if
    each round runs the two in the other order than the one before: then a steady drift only widens the interval. A
    round that something disturbed widens it too; nothing is thrown away. With two rounds it is 13 times as
    wide as their difference suggests, with three 4 times: more rounds are worth more than longer ones.

    Args:
        candidate: One positive measurement for each round.
        baseline: The same rounds of what it is compared with.
        confidence: In (0, 1).

    Raises:
        ValueError: If there are no rounds, not as many of both, or one is not positive.
    """
    if len(candidate) != len(baseline):
        raise ValueError(f"{len(candidate)} rounds of one and {len(baseline)} of the other cannot be paired")
    return _exponential(mean_interval(_logarithms(candidate) - _logarithms(baseline), confidence=confidence))


def unpaired_ratio(candidate: Sequence[float], baseline: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Candidate over baseline where each was measured for itself, at another time; spreads may differ (Welch).

    What the machine did differently at the two times is not in the interval and cannot be.

    Args:
        candidate: Positive measurements.
        baseline: Positive measurements, perhaps another number of them.
        confidence: In (0, 1).

    Raises:
        ValueError: If one has no measurements, or one is not positive.

    Source: Welch (1947), The generalization of "Student's" problem when several different population variances are
    involved; degrees of freedom by Satterthwaite (1946).
    """
    from scipy.special import stdtrit

    one, other = _checked(_logarithms(candidate), confidence), _checked(_logarithms(baseline), confidence)
    count, middle = min(len(one), len(other)), float(one.mean() - other.mean())
    if count < 2:
        return _exponential(Interval(middle, -math.inf, math.inf, count, confidence))
    parts = [float(each.var(ddof=1)) / len(each) for each in (one, other)]
    variance = sum(parts)
    if variance == 0:
        return _exponential(Interval(middle, middle, middle, count, confidence))
    freedom = variance**2 / sum(part**2 / (len(each) - 1) for part, each in zip(parts, (one, other), strict=True))
    half = float(stdtrit(freedom, (1 + confidence) / 2)) * math.sqrt(variance)
    return _exponential(Interval(middle, middle - half, middle + half, count, confidence))


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest measured value that at least this share of them do not exceed (the nearest rank).

    No value is made up between two that were measured. Where fewer than ``1 / (1 - share)`` were, it is the largest.

    Args:
        values: Measurements, one or more.
        share: In (0, 1]; 0.99 is the 99th percentile.

    Raises:
        ValueError: If there is no measurement, or the share is not in (0, 1].
    """
    if not 0 < share <= 1:
        raise ValueError(f"found {share} as a share, but it must be in (0, 1]")
    numbers = np.sort(_checked(values, 0.5))
    # Not a whole rank more for what binary fractions add: 0.95 * 20 is 19.000000000000004 of 20 otherwise.
    return float(numbers[max(0, math.ceil(share * len(numbers) - 1e-9) - 1)])


def part_means(values: Sequence[float], parts: int = 10) -> list[float]:
    """Means over so many parts of a row, or over fewer where there are fewer values.

    Measurements that follow one another are alike, and an interval that takes them for independent is too narrow. Means
    over long parts hardly are (the method of batch means).

    Args:
        values: In the order in which they were measured, one or more.
        parts: At least 1; of nearly equal length.
    """
    parts = min(parts, len(values))
    bounds = [round(part * len(values) / parts) for part in range(parts + 1)]
    return [statistics.fmean(values[begin:end]) for begin, end in pairwise(bounds)]


def share_interval(hits: int, trials: int, *, confidence: float = 0.95) -> Interval:
    """The share of trials that succeed, with the exact interval.

    Args:
        hits: How many did.
        trials: How many there were, at least one.
        confidence: In (0, 1).

    Raises:
        ValueError: If there were no trials, or fewer than hits.

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
    """How long until something happens, where some were only watched for a while.

    Attributes:
        median: The time by which half have got there; ``inf`` where fewer than half were seen to.
        reached: The share that was seen to get there.
        restarting: Mean time until one gets there if who fails begins anew: all time spent over the successes; ``inf``
            without any.
        curve: After each time at which one got there, the share that has not, by Kaplan and Meier.
    """

    median: Interval
    reached: Interval
    restarting: float
    curve: tuple[tuple[float, float], ...]


def time_to_event(times: Sequence[float], reached: Sequence[bool], *, confidence: float = 0.95) -> TimeToEvent:
    """Times to an event, with those that it had not met by the end of their watch.

    To leave out who did not get there would praise what fails often. Kaplan's and Meier's estimate counts each as long
    as it was watched. The interval of the median holds the times at which the estimate is not significantly away from
    one half, on the scale log(-log), which is better for few than the plain one.

    Args:
        times: When each got there, or how long it was watched; positive.
        reached: Whether it got there.
        confidence: In (0, 1).

    Raises:
        ValueError: If there is no time, one is not positive, or not as many of both.

    Source: Kaplan and Meier (1958), Nonparametric estimation from incomplete observations; Brookmeyer and Crowley
    (1982), A confidence interval for the median survival time; Greenwood (1926) for the variance.
    """
    from scipy.stats import CensoredData, ecdf

    if len(times) != len(reached):
        raise ValueError(f"{len(times)} times and {len(reached)} outcomes do not belong together")
    numbers = _checked(times, confidence)
    if numbers.min() <= 0:
        raise ValueError(f"found the time {numbers.min()}, but times are positive")
    there = np.asarray(reached, dtype=bool)
    estimate = ecdf(CensoredData.right_censored(numbers, ~there)).sf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # where all have got there, no interval is known
        band = estimate.confidence_interval(confidence, method="log-log")
    # Where one got there: of the last one alone nothing is known, and it bounds nothing.
    at = np.isin(estimate.quantiles, numbers[there])
    events, shares = estimate.quantiles[at], estimate.probabilities[at]

    def first(where: NDArray[np.bool_], otherwise: float) -> float:
        return float(events[where.argmax()]) if where.any() else otherwise

    median = Interval(
        first(shares <= 0.5, math.inf),
        first(~(band.low.probabilities[at] > 0.5), 0.0),
        first(band.high.probabilities[at] < 0.5, math.inf),
        len(numbers),
        confidence,
    )
    successes = int(there.sum())
    return TimeToEvent(
        median=median,
        reached=share_interval(successes, len(numbers), confidence=confidence),
        restarting=float(numbers.sum()) / successes if successes else math.inf,
        curve=tuple(zip(events.tolist(), shares.tolist(), strict=True)),
    )


def _exponential(found: Interval) -> Interval:
    high = math.inf if found.high > _LARGEST_LOGARITHM else math.exp(found.high)
    return Interval(math.exp(found.middle), math.exp(found.low), high, found.count, found.confidence)


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
