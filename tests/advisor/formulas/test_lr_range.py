"""What is read off the curve of a range test: fastai's rules, and silence where there is nothing to read."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline_advisor.formulas.learning_rate import RULES, minimum, slide, smoothed, steepest, suggest, trough, valley

RATES = [float(each) for each in np.geomspace(1e-7, 10, 100)]


def curve(*, noise: float = 0.0, seed: int = 0, fall: float = 1.5) -> list[float]:
    """A loss that falls around a rate of 0.04 and rises above 1."""
    x = np.linspace(0, 1, len(RATES))
    falling = 2.3 - fall / (1 + np.exp(-30 * (x - 0.7)))
    rising = np.where(x > 0.87, (x - 0.87) * 30, 0)
    draws = np.random.default_rng(seed).normal(0, noise, len(RATES))
    return [float(each) for each in falling + rising + draws]


def test_an_average_is_right_from_its_first_loss() -> None:
    assert smoothed([3.0, 3.0, 3.0], 0.98) == pytest.approx([3.0, 3.0, 3.0])
    # 0.5 * (0.5 * 1) + 0.5 * 4 = 2.25, over 1 - 0.5 ** 2.
    assert smoothed([1.0, 4.0], 0.5) == pytest.approx([1.0, 3.0])
    assert smoothed([1.0, 4.0, 2.0], 0.0) == [1.0, 4.0, 2.0]


def test_rules_on_a_curve_that_can_be_read_by_eye() -> None:
    rates = [10.0**power for power in range(10)]
    losses = [9.0, 8.9, 8.8, 8.7, 8.0, 6.0, 3.0, 2.0, 1.5, 40.0]
    # Nine points fall, up to that at 10 ** 8: half of nine points into a valley that begins one before the first.
    assert valley(rates, losses) == 10.0**3
    assert steepest(rates, losses) == 10.0**5
    assert minimum(rates, losses) == 10.0**7


def test_rules_are_those_of_fastai() -> None:
    """Values of fastai's own functions on this curve, whose first tenth and last five points it leaves out."""
    rates, averages = RATES[10:-5], smoothed(curve(noise=0.05), 0.9)[10:-5]
    index = {name: rates.index(RULES[name].choose(rates, averages)) for name in ("valley", "steepest", "slide")}
    assert index == {"valley": 57, "steepest": 64, "slide": 31}
    assert minimum(rates, averages) == rates[int(np.argmin(averages))] / 10


def test_a_trough_is_where_the_loss_is_lowest_and_its_average_is_not() -> None:
    losses, ratio = curve(noise=0.02), RATES[1] / RATES[0]
    lowest = RATES[int(np.argmin(curve()))]
    # Half a window at most, as the loss rises more sharply there than it fell.
    assert lowest / ratio**5 < trough(RATES, losses) < lowest * 1.01
    assert RATES[int(np.argmin(smoothed(losses, 0.98)))] > lowest * ratio**2.5


def test_a_window_that_slides_needs_room_and_a_place_to_rest() -> None:
    with pytest.raises(ValueError, match="more than 16 points, but 16 are usable"):
        slide(RATES[:16], [1.0] * 16)
    bent = [float(each) for each in 0.01 * np.arange(40.0) ** 2]
    with pytest.raises(ValueError, match="the slope keeps changing"):
        slide(RATES[:40], bent)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_every_rule_has_a_rate_on_a_usual_curve(noise: float) -> None:
    for name, found in suggest(RATES, [curve(noise=noise)], smoothing=0.98).items():
        assert found.lr is not None, (name, found.why_not)
        assert 1e-6 < found.lr < 1
        assert found.rule
        assert found.source


def test_the_default_lies_in_its_range_and_between_the_rules() -> None:
    found = suggest(RATES, [curve(noise=0.1, seed=seed) for seed in range(3)], smoothing=0.98)
    lowest, _, highest = sorted(found[name].lr or 0.0 for name in ("trough", "steepest", "minimum"))
    default = found["median"]
    assert default.lr is not None
    assert lowest < default.lr < highest
    assert default.low is not None
    assert default.high is not None
    assert default.low < default.lr < default.high


@pytest.mark.parametrize("smoothing", [0.0, 0.9, 0.98])
def test_what_never_falls_has_no_suggestion(smoothing: float) -> None:
    silent = 0
    for seed in range(100):
        draws = [float(each) for each in np.random.default_rng(seed).normal(2.3, 0.1, 100)]
        silent += all(each.lr is None for each in suggest(RATES, [draws], smoothing=smoothing).values())
    assert silent >= 90
    rising = suggest(RATES, [[float(each) for each in np.linspace(2, 3, 100)]], smoothing=smoothing)
    assert all("does not fall" in each.why_not for each in rising.values())


def test_what_diverges_at_once_has_no_suggestion() -> None:
    found = suggest(RATES[:9], [[2.0, 3.0, 5.0, 8.0, 13.0, 21.0, 34.0, 55.0, 89.0]], smoothing=0.9, steps=100)
    assert all(each.lr is None and "already too high" in each.why_not for each in found.values())


def test_numbers_of_a_suggestion_are_plain() -> None:
    found = suggest(RATES, [curve()], smoothing=0.9)
    assert all(type(each.lr) is float and math.isfinite(each.lr) for each in found.values())
