"""How far may a run's curves lie from those of others, if only the seed differs?

The band is a simultaneous prediction band: of runs that differ by the seed alone, at most a share ``ALPHA`` leaves it
at any of its points. At one point, on a scale on which seeds scatter evenly, a further value lies within
m ± t(1 - α/2, n-1) · s · √(1 + 1/n) of the mean m of n others with standard deviation s, with probability 1 - α: the
prediction interval for one future observation (Hahn and Meeker 1991, section 4.7). It is honest for few runs, as t
widens. With α divided by the number of points (Bonferroni) it holds for all of them together, however they depend on
one another. Where there are 19 runs or more, the limit is moreover no less than what 95 % of them keep when each is
held against the others: a guard against scatter that is not normal (Barber et al. 2021, the jackknife+).

Arrays are [..., runs, points]; sets of runs may be stacked in front.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from paceline.insight.bands.curves import Scale

Array = NDArray[np.float64]

ALPHA = 0.05
"""Share of whole runs that may leave their band for no reason."""

# Machines, threads and precisions change what seeds do not: so much spread there is at least.
_LEAST_RELATIVE = {"log": 0.003, "linear": 0.003}


def to_scale(scale: Scale, values: Array, samples: int) -> Array:
    """Bring values to the scale; an accuracy of all or none of the samples is half a sample from the end."""
    if scale == "log":
        return np.asarray(np.log(values))
    if scale == "logit":
        share = (values / 100 * samples + 0.5) / (samples + 1)
        return np.asarray(np.log(share / (1 - share)))
    return values


def from_scale(scale: Scale, value: float, samples: int) -> float:
    """What :func:`to_scale` made of one value."""
    if scale == "log":
        return math.exp(value)
    if scale == "logit":
        share = ((samples + 1) / (1 + math.exp(-value)) - 0.5) / samples
        return 100 * min(1.0, max(0.0, share))
    return value


def least_spread(scale: Scale, scaled: Array, samples: int) -> Array:
    """The standard deviation that there is at least at each point, on the scale: of an accuracy, one sample's worth."""
    middle = scaled.mean(axis=-2)
    if scale == "logit":
        share = 1 / (1 + np.exp(-middle))
        return np.asarray(1 / (samples * share * (1 - share)))
    least = _LEAST_RELATIVE[scale]
    return np.asarray(np.full_like(middle, least) if scale == "log" else least * np.abs(middle))


def deviations(values: Array, others: Array, least: Array) -> Array:
    """By how many standard errors of prediction values [..., points] lie above or below the mean of others."""
    count = others.shape[-2]
    return np.asarray((values - others.mean(axis=-2)) / half_widths(others, least, 1.0, count))


def half_widths(others: Array, least: Array, limit: float, count: int) -> Array:
    """Half the band's width at each point."""
    spread = np.maximum(others.std(axis=-2, ddof=1), least)
    return np.asarray(limit * spread * math.sqrt(1 + 1 / count))


def limit_of(others: Array, least: Array) -> Array:
    """How many standard errors a run may deviate at any point, for each stacked set of runs."""
    count, points = others.shape[-2:]
    normal = student_limit(count, points)
    rank = math.ceil((1 - ALPHA) * (count + 1))
    if rank > count:
        return np.full(others.shape[:-2], normal)
    return np.asarray(np.maximum(normal, np.sort(left_out(others, least), axis=-1)[..., rank - 1]))


def student_limit(count: int, points: int) -> float:
    """The limit for normal scatter: Student's t with Bonferroni's division."""
    from scipy.special import stdtrit

    return float(stdtrit(count - 1, 1 - ALPHA / (2 * points)))


def left_out(others: Array, least: Array) -> Array:
    """The largest deviation of each run from the rest, [..., runs]."""
    found = []
    for run in range(others.shape[-2]):
        rest = np.delete(others, run, axis=-2)
        found.append(np.abs(deviations(others[..., run, :], rest, least)).max(axis=-1))
    return np.stack(found, axis=-1)
