"""Suggestions of a learning rate from the curves of range tests."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline_advisor import frozen

# The loss has decreased if the mean of a few consecutive losses is more than this many standard errors below the mean
# of all earlier ones.
_SURE = 3.5
_FEWEST = 5
_FASTAI = "fastai, callback.schedule"
_LEFT_OUT_AT_END = 5
_SLIDE_POINTS = 15
_SLIDE_CHANGE = 0.005
# Parts of the loss's fall whose rates are votes for the default.
_VOTES = (0.8, 0.9, 1.0)
# On a wide plateau noise decides where the loss is lowest: no vote counts as more than this many times the first.
_PLATEAU = 5.0
# They are read off means of this part of the steps, which follow a noisy loss less than those of a tenth do.
_VOTE_WIDTH = 6
# A vote that is this many times below the median vote comes from noise before the fall.
_FAR_BELOW = 100.0


Series = Sequence[float]


@dataclass(frozen=True)
class RangeTestRule:
    """A rule that reads a learning rate from the curve of a range test.

    Attributes:
        words: The rule in one phrase.
        source: Its publication or implementation.
        choose: Returns the learning rate, given rates and losses of the usable steps; raises ValueError with the reason
            if the curve has no such point.
        smooth: Whether it uses the smoothed losses instead of the raw losses.
    """

    words: str
    source: str
    choose: Callable[[Series, Series], float]
    smooth: bool = True


@frozen
class Suggestion:
    """One rule's suggestion.

    Attributes:
        lr: The learning rate; None if the curve has no such point.
        low: The lowest vote for it; None if the rule reads one rate.
        high: The highest vote.
        why_not: Why there is no learning rate; otherwise empty.
        rule: The rule in one phrase.
        source: Its publication or implementation.
    """

    lr: float | None
    low: float | None = None
    high: float | None = None
    why_not: str = ""
    rule: str
    source: str


def smoothed(losses: Series, smoothing: float) -> list[float]:
    """Return the exponential moving average of the losses, with bias correction (Kingma and Ba 2014).

    Args:
        losses: The loss of each step.
        smoothing: Weight of the past, in [0, 1).
    """
    average, found = 0.0, []
    for count, loss in enumerate(losses, start=1):
        average = smoothing * average + (1 - smoothing) * loss
        found.append(average / (1 - smoothing**count))
    return found


def valley(rates: Series, losses: Series) -> float:
    """Return the learning rate in the middle of the longest valley of the loss.

    The valley is found from the longest sequence of falling losses, which need not be consecutive. As in fastai, it
    ends where that sequence ends, and has as many steps as the sequence.

    Raises:
        ValueError: If no loss is below an earlier one.
    """
    lengths = [1] * len(losses)
    for index, loss in enumerate(losses):
        before = [lengths[earlier] for earlier in range(index) if loss < losses[earlier]]
        lengths[index] = 1 + max(before, default=0)
    longest = max(lengths)
    if longest < 2:
        raise ValueError("the loss never falls")
    end = lengths.index(longest)
    third = longest / 3
    return rates[max(0, end - longest + int(third) + int(third / 2))]


def steepest(rates: Series, losses: Series) -> float:
    """Return the learning rate where the loss falls fastest against the logarithm of the rate.

    Raises:
        ValueError: If it never falls.
    """
    slopes = np.diff(losses) / np.diff(np.log(rates))
    if not slopes.size or slopes.min() >= 0:
        raise ValueError("the loss never falls")
    return rates[int(slopes.argmin())]


def minimum(rates: Series, losses: Series) -> float:
    """Return a tenth of the learning rate with the lowest loss."""
    return rates[int(np.argmin(losses))] / 10


def slide(rates: Series, losses: Series) -> float:
    """Return the learning rate where a window of 15 steps, sliding down from the highest rate, stops.

    The window stops when the slopes at its two ends differ by at most 0.005. As in fastai, the rate is that of the
    lower end one step before.

    Raises:
        ValueError: If there are too few points, or no such point.
    """
    if len(losses) <= _SLIDE_POINTS + 1:
        raise ValueError(f"it needs more than {_SLIDE_POINTS + 1} points, but {len(losses)} are usable")
    slopes = np.gradient(np.asarray(losses))
    right = len(losses) - 1
    left = right - _SLIDE_POINTS
    found = rates[left]
    while left >= 0 and abs(slopes[right] - slopes[left]) > _SLIDE_CHANGE:
        found = rates[left]
        right, left = right - 1, left - 1
    if left < 0:
        raise ValueError("the slope keeps changing: there is no such point")
    return found


def fall(rates: Series, losses: Series, share: float, *, width: int) -> float:
    """Return the learning rate at which a share of the loss's fall, down to its lowest mean, is done.

    The means over ``width`` steps are centred: the minimum of a causal average comes later than that of the loss, the
    more the stronger the smoothing.
    """
    means = _means(losses, width)
    lowest = int(means.argmin())
    above = np.flatnonzero(means[:lowest] > means[0] - share * (means[0] - means[lowest]))
    return rates[(int(above[-1]) + 1 if above.size else 0) + width // 2]


def trough(rates: Series, losses: Series) -> float:
    """Return the learning rate in the middle of those consecutive steps, a tenth of all, with the lowest mean loss."""
    return fall(rates, losses, 1.0, width=_tenth(losses))


def trough_steps(losses: Series, *, steps: int) -> slice:
    """Return the steps of the trough of a usable curve.

    Args:
        losses: The loss of each step.
        steps: Planned steps of the test.
    """
    first, last = _usable(losses, steps)
    width = _tenth(losses[first:last])
    lowest = first + int(_means(losses[first:last], width).argmin())
    return slice(lowest, lowest + width)


def noise(losses: Series, *, steps: int) -> float:
    """Return the standard error of the trough's mean as a share of the loss's fall; infinite without a fall.

    Args:
        losses: The loss of each step of one test.
        steps: Planned steps of the test.
    """
    first, last = _usable(losses, steps)
    if last - first < _FEWEST:
        return math.inf
    width = _tenth(losses[first:last])
    means = _means(losses[first:last], width)
    lowest = int(means.argmin())
    # Measured between neighbours, so that the descent itself does not count as noise.
    square = float(np.square(np.diff(losses[first : first + lowest + width])).mean()) / 2
    return math.sqrt(square / width) / max(float(means[0] - means[lowest]), 1e-30)


def _tenth(losses: Series) -> int:
    return max(_FEWEST, len(losses) // 10)


def _means(losses: Series, width: int) -> NDArray[np.float64]:
    return np.convolve(losses, np.full(width, 1 / width), mode="valid")


def _usable(losses: Series, steps: int) -> tuple[int, int]:
    """Return the first step that rules look at, and the one after the last."""
    return steps // 10, len(losses) - _LEFT_OUT_AT_END


def lowest_between(rates: Series, losses: Series) -> float:
    """Return where a parabola through the lowest loss and its neighbours is lowest, over the logarithm of the rate.

    Without two neighbours it is the rate of the lowest loss. It is never below that: above the best rates the loss
    jumps up, unlike a parabola.

    Args:
        rates: Rates, each the same factor above the one before.
        losses: The loss of each; at least one is finite.
    """
    place = int(np.argmin(losses))
    if not 0 < place < len(losses) - 1:
        return rates[place]
    below, lowest, above = losses[place - 1 : place + 2]
    move = 0.0 if above >= below or math.isinf(below) else 0.5 * (below - above) / (below - 2 * lowest + above)
    return rates[place] * math.pow(rates[place + 1] / rates[place], move)


def pooled(curves: Sequence[Series]) -> list[float]:
    """Return the median over several tests of each step's loss; the loss of a test that has ended is infinite."""
    longest = max(map(len, curves))
    losses = np.sort([[*curve, *[np.inf] * (longest - len(curve))] for curve in curves], axis=0)[len(curves) // 2]
    return [float(each) for each in losses if np.isfinite(each)]


RULES: Mapping[str, RangeTestRule] = {
    "trough": RangeTestRule(
        "the middle of the lowest stretch of the loss, a tenth of the steps long",
        "the extremum of Smith 2018, section 4.1, as a peak that a schedule falls from",
        trough,
        smooth=False,
    ),
    "valley": RangeTestRule("the middle of the longest valley of the loss", f"{_FASTAI}.valley", valley),
    "steepest": RangeTestRule("where the loss falls fastest against log(rate)", f"{_FASTAI}.steep", steepest),
    "minimum": RangeTestRule("a tenth of the rate with the lowest loss", f"{_FASTAI}.minimum", minimum),
    "slide": RangeTestRule(
        "coming from the highest rate, where the slope stops changing over 15 points", f"{_FASTAI}.slide", slide
    ),
}

MEDIAN = "median"


def suggest(
    rates: Series, curves: Sequence[Series], *, smoothing: float, steps: int | None = None, why_not: str = ""
) -> dict[str, Suggestion]:
    """Return the suggestion of every rule from the pooled curve of range tests, and the median vote of all tests.

    Args:
        rates: Learning rate of each step, ascending, up to the last step of any test.
        curves: For each test the loss of each step before its update; all finite.
        smoothing: Weight of the past in the average that the rules use, in [0, 1).
        steps: Planned steps of a test; by default the most that one took. A tenth of them is left out at the beginning.
        why_not: A reason to suggest nothing.
    """
    losses = pooled(curves)
    steps = max(map(len, curves)) if steps is None else steps
    first, last = _usable(losses, steps)
    curve, why_not = smoothed(losses, smoothing), _why_none(losses, first, last) or why_not
    found = {
        name: _suggested(rule, rates[first:last], (curve if rule.smooth else losses)[first:last], why_not)
        for name, rule in RULES.items()
    }
    width = max(_FEWEST, (steps - steps // 10 - _LEFT_OUT_AT_END) // _VOTE_WIDTH)
    chosen, *votes = (_votes(rates, each, steps, width) for each in (losses, *curves))
    why_not = why_not or "the tests end too early" * (not chosen)
    return {MEDIAN: _median(chosen, [vote for each in votes for vote in each], why_not), **found}


def _votes(rates: Series, losses: Series, steps: int, width: int) -> list[float]:
    first, last = _usable(losses, steps)
    if last - first < width:
        return []
    return [fall(rates[first:last], losses[first:last], share, width=width) for share in _VOTES]


def _median(chosen: Sequence[float], votes: Sequence[float], why_not: str) -> Suggestion:
    words = "the middle of 80, 90 and 100 % of the fall of the median loss; in brackets those of each test"
    if why_not:
        return Suggestion(lr=None, why_not=why_not, rule=words, source="see trough")
    kept = [each for each in votes if each * _FAR_BELOW > statistics.median(votes)]
    if dropped := len(votes) - len(kept):
        words += f", without {dropped} of {len(votes)}, a hundred times below the others"
    return Suggestion(
        lr=math.exp(statistics.mean(math.log(min(vote, _PLATEAU * chosen[0])) for vote in chosen)),
        low=float(min(kept)),
        high=float(max(kept)),
        rule=words,
        source="see trough",
    )


def _suggested(rule: RangeTestRule, rates: Series, losses: Series, why_not: str) -> Suggestion:
    chosen = None
    if not why_not:
        try:
            chosen = float(rule.choose(rates, losses))
        except ValueError as error:
            why_not = str(error)
    return Suggestion(lr=chosen, why_not=why_not, rule=rule.words, source=rule.source)


def _why_none(losses: Series, first: int, last: int) -> str:
    """Return why a curve is unusable, or an empty string."""
    if last - first < _FEWEST:
        return f"the test ended after {len(losses)} steps: its first rates are already too high"
    window = max(_FEWEST, len(losses) // 10)
    sums = np.concatenate([[0.0], np.cumsum(losses)])
    ends = np.arange(2 * window, last + 1)
    if not ends.size:
        return f"{len(losses)} steps are too few to tell a fall of the loss from its noise"
    begins = ends - window
    falls = sums[begins] / begins - (sums[ends] - sums[begins]) / window
    # Measured between neighbours, so that the descent itself does not count as noise.
    squares = np.cumsum(np.square(np.diff(losses))) / np.arange(1, len(losses)) / 2
    errors = np.sqrt(squares[ends - 2] * (1 / window + 1 / begins))
    if (falls <= _SURE * errors).all():
        return "the loss does not fall by more than its noise"
    return ""
