"""Suggestions of a learning rate from the curve of a range test."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paceline_advisor import frozen

# The loss has decreased if the mean of a few consecutive losses is more than this many standard errors below the mean
# of all earlier ones.
_SURE = 3.5
_FEWEST = 5
_FASTAI = "fastai, callback.schedule"
_LEFT_OUT_AT_END = 5
_SLIDE_POINTS = 15
_SLIDE_CHANGE = 0.005


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
        why_not: Why there is no learning rate; otherwise empty.
        rule: The rule in one phrase.
        source: Its publication or implementation.
    """

    lr: float | None
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


def trough(rates: Series, losses: Series) -> float:
    """Return the learning rate in the middle of those consecutive steps, a tenth of all, with the lowest mean loss.

    The mean is centred. The minimum of a causal average comes later than that of the loss, the more the stronger the
    smoothing.
    """
    width = max(_FEWEST, len(losses) // 10)
    means = np.convolve(losses, np.ones(width), mode="valid")
    return rates[int(means.argmin()) + width // 2]


RULES: Mapping[str, RangeTestRule] = {
    "trough": RangeTestRule(
        "the middle of the tenth of the steps with the lowest mean loss",
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
# The rules that choose a point on the descent, not on the flat part before it or on the rise after it.
_OF_MEDIAN = ("trough", "steepest", "minimum")


def suggest(rates: Series, losses: Series, *, smoothing: float, steps: int | None = None) -> dict[str, Suggestion]:
    """Return the suggestion of every rule, and the median, for a range test.

    Args:
        rates: Learning rate of each step, ascending.
        losses: Loss of each step before its update; all finite.
        smoothing: Weight of the past in the average that the rules use, in [0, 1).
        steps: Planned steps of the test; by default those that it took. A tenth of them is left out at the beginning.
    """
    curve = smoothed(losses, smoothing)
    first, last = (len(losses) if steps is None else steps) // 10, len(losses) - _LEFT_OUT_AT_END
    why_not = _why_none(losses, first, last)
    found = {
        name: _suggested(rule, rates[first:last], (curve if rule.smooth else losses)[first:last], why_not)
        for name, rule in RULES.items()
    }
    return {MEDIAN: _median(found), **found}


def _median(found: Mapping[str, Suggestion]) -> Suggestion:
    chosen = [found[name] for name in _OF_MEDIAN]
    without = [each.why_not for each in chosen if each.lr is None]
    return Suggestion(
        lr=None if without else statistics.median(each.lr for each in chosen if each.lr is not None),
        why_not=without[0] if without else "",
        rule=f"the median of {', '.join(_OF_MEDIAN)}",
        source="see these rules",
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
