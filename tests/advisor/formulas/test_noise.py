"""The noise scale from pairs of gradient norms: unbiased, with an interval that holds what it says."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.metrics.gradient_noise import (
    CRITICAL_SHARES,
    DECADE,
    NoiseAverages,
    NoiseEstimate,
    critical_range,
    estimate,
    linear_rate_excess,
    rate_ratio,
)

# Of a gradient of 40 numbers whose samples have a noise scale of 300.
TRUE, DEVIATION = 0.1, math.sqrt(0.1**2 * 300)
MEAN = np.full(40, TRUE)

# McCandlish et al., arXiv:1812.06162, table 1, averages over the training: B_crit, B_simple. Of Dota 5v5 "more than
# 8 million (est.)"; of Atari the middles of two ranges.
TABLE_1 = {
    "MNIST": (200, 900),
    "SVHN": (500, 4000),
    "CIFAR10": (900, 2000),
    "ImageNet": (15_000, 30_000),
    "Autoencoder (SVHN)": (40, 2),
    "VAE (SVHN)": (200, 10),
    "Billion Word": (100_000, 150_000),
    "Atari": (math.sqrt(400 * 8000), math.sqrt(1000 * 20_000)),
    "Dota 1v1": (3_000_000, 300_000),
    "Dota 5v5": (8_000_000, 24_000_000),
}
# The same at the start of the training, for the supervised tasks.
SUPERVISED_AT_START = {
    "MNIST": (20, 50),
    "SVHN": (50, 300),
    "CIFAR10": (300, 400),
    "ImageNet": (1000, 4000),
    "Billion Word": (700, 1000),
}


def simulated(steps: int, seed: int, *, parts: int = 4, size: int = 16) -> NoiseAverages:
    """Steps of so many micro-batches of so many samples."""
    draws = np.random.default_rng(seed)
    averages = NoiseAverages()
    for _ in range(steps):
        gradients = MEAN + draws.normal(0, DEVIATION / math.sqrt(size), (parts, 40))
        small, large = (gradients**2).sum(1).mean(), (gradients.mean(0) ** 2).sum()
        found = estimate(size, float(small), parts * size, float(large))
        assert found is not None
        averages.add(found)
    return averages


def test_the_estimates_are_unbiased() -> None:
    averages = simulated(20_000, 0)
    assert averages.mean_variance == pytest.approx(40 * DEVIATION**2, rel=0.01)
    assert averages.mean_square == pytest.approx(40 * TRUE**2, rel=0.05)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    stack = sum(300 in found for seed in range(400) if (found := simulated(100, seed).noise_scale()) is not None)
    assert 0.93 <= stack / 400 <= 0.97


def test_a_gradient_that_may_be_zero_bounds_nothing_above() -> None:
    draws = np.random.default_rng(1)
    averages = NoiseAverages.of(NoiseEstimate(2.0 + 0.1 * x, 0.15 + y) for x, y in draws.normal(0, 1, (50, 2)))
    found = averages.noise_scale()
    assert found is not None
    assert math.isinf(found.high)
    assert 0 < found.low < found.middle
    assert NoiseAverages.of([NoiseEstimate(1.0, -1.0)]).noise_scale() is None
    assert NoiseAverages().noise_scale() is None
    once = NoiseAverages.of([NoiseEstimate(4.0, 2.0)]).noise_scale()
    assert once is not None
    assert (once.middle, once.low, once.high) == (2.0, 0.0, math.inf)


def test_old_estimates_count_for_less() -> None:
    averages = NoiseAverages(half_life=10)
    for _ in range(1000):
        averages.add(NoiseEstimate(1.0, 1.0))
    assert averages.mean_variance == pytest.approx(1)
    for _ in range(10):
        averages.add(NoiseEstimate(3.0, 1.0))
    assert averages.mean_variance == pytest.approx(2)
    assert averages.count == pytest.approx(2 * 10 / math.log(2), rel=0.01)


def test_averages_go_on_from_what_was_saved() -> None:
    one, other = NoiseAverages(half_life=7), NoiseAverages(half_life=7)
    for number in range(20):
        one.add(NoiseEstimate(number, 1 / (1 + number)))
        other.add(NoiseEstimate(number, 1 / (1 + number)))
        restored = NoiseAverages(half_life=7)
        restored.load(other.to_json())
        other = restored
    assert one == other


@pytest.mark.parametrize("batches", [(4, 1.0, 4, 1.0), (8, 1.0, 4, 1.0), (4, math.nan, 8, 1.0), (4, 1.0, 8, math.inf)])
def test_what_tells_nothing_gives_no_estimate(batches: tuple[float, float, float, float]) -> None:
    assert estimate(*batches) is None


def test_published_critical_batches_of_supervised_tasks_lie_in_the_range_of_their_noise_scale() -> None:
    tasks = {name: TABLE_1[name] for name in SUPERVISED_AT_START}
    ratios = [critical / simple for critical, simple in (*tasks.values(), *SUPERVISED_AT_START.values())]
    assert (min(ratios), max(ratios)) == CRITICAL_SHARES


def test_a_range_narrower_than_a_decade_needs_the_steps_that_are_said() -> None:
    few = [simulated(30, seed) for seed in range(20)]
    assert all(is_wide(each) for each in few)
    needed = [found for each in few if (found := each.needed_for_a_decade()) is not None]
    assert len(needed) >= 15
    enough = sorted(needed)[len(needed) // 2]
    assert enough < 300
    assert sum(is_wide(simulated(enough, seed)) for seed in range(20)) <= 4
    assert NoiseAverages.of([NoiseEstimate(1.0, -1.0)] * 3).needed_for_a_decade() is None


def is_wide(averages: NoiseAverages) -> bool:
    found = averages.noise_scale()
    if found is None:
        return True
    low, high = critical_range(found)
    return high >= DECADE * low


def test_the_best_rate_bends_away_from_the_line() -> None:
    assert linear_rate_excess(1000, 1000) == 2
    assert linear_rate_excess(1000, 1) == pytest.approx(1.001)
    assert rate_ratio(1000, 2, 1) == pytest.approx(2, rel=0.01)
    assert rate_ratio(1000, 1e9, 1000) == pytest.approx(2)
