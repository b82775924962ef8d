"""Do the intervals hold what they promise, also for few measurements, drift and disturbances? By simulation."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from paceline.metrics.intervals import (
    mean_interval,
    paired_ratio,
    quantile,
    rate_interval,
    share_interval,
    time_to_event,
    unpaired_ratio,
)

REPEATS = 1500
# Three standard errors of a share of 0.95 among so many repeats.
SLACK = 3 * math.sqrt(0.95 * 0.05 / REPEATS)


def alternating(generator: np.random.Generator, count: int, ratio: float, noise_: np.ndarray) -> tuple[list, list]:
    """Two things measured in turns, in the other order each time, in a machine with a weather of 2 slots a round."""
    noise = np.exp(generator.normal(0, 0.03, (count, 2)))
    slots = np.exp(noise_).reshape(count, 2)
    turned = np.arange(count) % 2 == 1
    first = np.where(turned, slots[:, 1], slots[:, 0]) * noise[:, 0] * ratio
    second = np.where(turned, slots[:, 0], slots[:, 1]) * noise[:, 1]
    return list(first), list(second)


def still(generator: np.random.Generator, slots: int) -> np.ndarray:
    return np.zeros(slots)


def steady_drift(generator: np.random.Generator, slots: int) -> np.ndarray:
    return np.linspace(0, 0.5, slots)


def drifting(generator: np.random.Generator, slots: int) -> np.ndarray:
    return np.cumsum(generator.normal(0, 0.02, slots))


def hiccups(generator: np.random.Generator, slots: int) -> np.ndarray:
    return generator.exponential(0.5, slots) * (generator.random(slots) < 0.1)


@pytest.mark.parametrize("count", [3, 6, 20])
@pytest.mark.parametrize("noise_", [still, steady_drift, drifting, hiccups])
def test_paired_ratios_cover_the_truth(noise_: Callable[[np.random.Generator, int], np.ndarray], count: int) -> None:
    generator, truth = np.random.default_rng(count), 1.07
    hits = sum(
        truth in paired_ratio(*alternating(generator, count, truth, noise_(generator, 2 * count)))
        for _ in range(REPEATS)
    )
    assert hits / REPEATS >= 0.95 - SLACK
    if noise_ is still:
        # Nor is it wider than it needs to be.
        assert hits / REPEATS <= 0.95 + SLACK


def test_pairs_see_through_a_weather_that_hides_the_difference() -> None:
    generator, count = np.random.default_rng(0), 12
    paired, unpaired = [], []
    for _ in range(100):
        pair = alternating(generator, count, 1.05, generator.normal(0, 0.3, count).repeat(2))
        paired.append(1.0 not in paired_ratio(*pair))
        unpaired.append(1.0 not in unpaired_ratio(*pair))
    assert np.mean(paired) > 0.9 > 0.2 > np.mean(unpaired)


def test_a_single_pair_bounds_nothing() -> None:
    found = paired_ratio([2.0], [1.0])
    assert (found.middle, found.low, found.high) == (2.0, 0.0, math.inf)


def test_swapping_the_two_turns_the_ratio_over() -> None:
    one, other = [1.0, 1.2, 1.1], [2.0, 2.1, 2.6]
    present, back = paired_ratio(one, other), paired_ratio(other, one)
    assert (present.middle * back.middle, present.low * back.high) == pytest.approx((1, 1))


def test_unpaired_ratios_cover_the_truth_where_spreads_differ() -> None:
    generator = np.random.default_rng(1)
    hits = sum(
        1.1 in unpaired_ratio(1.1 * np.exp(generator.normal(0, 0.1, 4)), np.exp(generator.normal(0, 0.02, 12)))
        for _ in range(REPEATS)
    )
    assert abs(hits / REPEATS - 0.95) <= SLACK


def test_means_by_students_own_table() -> None:
    # Student's (1908) example: additional hours of sleep by ten patients; t = 4.06, 9 degrees of freedom.
    found = mean_interval([1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4])
    assert found.middle == pytest.approx(1.58)
    assert found.middle / ((found.high - found.middle) / 2.2622) == pytest.approx(4.06, abs=0.005)


def test_rates_are_of_all_the_time_there_was() -> None:
    # Two in 1.25 seconds, and not the mean of 4 and 1 a second.
    assert rate_interval([0.25, 1.0]).middle == pytest.approx(2 / 1.25)
    steady = rate_interval([0.1, 0.11, 0.1, 0.09])
    assert steady.low < 10 < steady.high < 13
    assert rate_interval([0.1, 1.0]).high == rate_interval([0.1]).high == math.inf


def test_quantiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [quantile(values, share) for share in (0.5, 0.9, 0.95, 0.99, 1)] == [50, 90, 95, 99, 100]
    assert quantile(values[:20], 0.95) == 19
    assert quantile(values[:4], 0.3) == 2
    assert quantile([3.0, 1.0, 2.0], 0.99) == 3
    with pytest.raises(ValueError, match="share"):
        quantile(values, 0)


def test_shares_cover_the_truth() -> None:
    generator = np.random.default_rng(2)
    for truth in (0.5, 0.95):
        hits = sum(truth in share_interval(int(generator.binomial(8, truth)), 8) for _ in range(REPEATS))
        assert hits / REPEATS >= 0.95 - SLACK
    assert share_interval(5, 5).high == 1
    # The rule of three: none of n seen leaves up to about 3/n.
    assert share_interval(0, 100).high == pytest.approx(0.036, abs=0.001)


def test_kaplan_and_meiers_estimate() -> None:
    # Freireich et al. (1963), weeks in remission with 6-MP, as every textbook prints it: S(23) = 0.448, median 23.
    times = [6, 6, 6, 7, 10, 13, 16, 22, 23, 6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35]
    found = time_to_event(times, [True] * 9 + [False] * 12)
    shares = dict(found.curve)
    assert [shares[week] for week in (6, 7, 10, 13, 16, 22, 23)] == pytest.approx(
        [0.857, 0.807, 0.753, 0.690, 0.627, 0.538, 0.448], abs=5e-4
    )
    assert found.median.middle == 23
    # With the scale log(-log): 13 to nothing, as R's survfit(conf.type="log-log") says.
    assert (found.median.low, found.median.high) == (13, math.inf)
    assert found.restarting == sum(times) / 9


@pytest.mark.parametrize(("count", "watched"), [(5, math.inf), (10, math.inf), (10, 1.5), (25, 1.0)])
def test_medians_cover_the_truth_with_and_without_censoring(count: int, watched: float) -> None:
    generator, truth, hits = np.random.default_rng(count), math.log(2), 0
    for _ in range(REPEATS):
        times = generator.exponential(1, count)
        hits += truth in time_to_event(np.minimum(times, watched), times <= watched).median
    assert hits / REPEATS >= 0.94 - SLACK


def test_runs_that_never_got_there_are_not_left_out() -> None:
    times, reached = [10.0, 11.0, 12.0, 60.0, 60.0], [True, True, True, False, False]
    assert time_to_event(times, reached).median.middle == 12
    none = time_to_event([60.0, 60.0], [False, False])
    assert (none.median.middle, none.restarting, none.reached.middle) == (math.inf, math.inf, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: paired_ratio([1.0], [1.0, 2.0]),
        lambda: paired_ratio([0.0], [1.0]),
        lambda: rate_interval([0.0, 1.0]),
        lambda: mean_interval([]),
        lambda: mean_interval([math.nan, 1.0]),
        lambda: mean_interval([1.0, 2.0], confidence=95),
        lambda: share_interval(3, 2),
        lambda: time_to_event([1.0], [True, False]),
    ],
)
def test_what_has_no_interval_is_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        wrong()
