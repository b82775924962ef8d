"""How many runs that differ by chance alone leave their band?"""

from __future__ import annotations

import numpy as np
import pytest

from paceline.insight.bands.statistic import (
    ALPHA,
    deviations,
    from_scale,
    least_spread,
    left_out,
    limit_of,
    student_limit,
    to_scale,
)

POINTS = 30


def _runs(sets: int, count: int, seed: int, *, heavy: bool = False) -> np.ndarray:
    """Sets of runs whose points hang together, as windows of one curve do."""
    rng = np.random.default_rng(seed)
    shape = (sets, count, POINTS)
    noise = rng.standard_t(4, shape) if heavy else rng.normal(size=shape)
    return 0.7 * rng.normal(size=(sets, count, 1)) + noise


def _share_that_leaves(count: int, sets: int, *, heavy: bool = False) -> float:
    runs = _runs(sets, count + 1, seed=count, heavy=heavy)
    others, fresh = runs[:, :-1], runs[:, -1]
    least = np.full((sets, POINTS), 1e-9)
    limit = limit_of(others, least)
    return float((np.abs(deviations(fresh, others, least)).max(axis=-1) > limit).mean())


@pytest.mark.parametrize("count", [5, 8, 20, 40])
def test_at_most_one_run_in_twenty_leaves_for_no_reason(count: int) -> None:
    # Of 2,000 sets, 5 % have a standard error of 0.5 %.
    assert _share_that_leaves(count, 2000) <= ALPHA + 0.01


def test_scatter_that_is_not_normal_is_met_by_the_runs_themselves() -> None:
    assert _share_that_leaves(40, 1000, heavy=True) <= ALPHA + 0.02


def test_a_shift_is_seen_the_better_the_more_runs_there_are() -> None:
    shares = []
    for count in (5, 20):
        runs = _runs(500, count + 1, seed=1)
        others, fresh = runs[:, :-1], runs[:, -1] + 7 * np.sqrt(1.49)
        least = np.full((500, POINTS), 1e-9)
        shares.append(float((np.abs(deviations(fresh, others, least)).max(axis=-1) > limit_of(others, least)).mean()))
    assert shares[0] > 0.5
    assert shares[1] > 0.99


def test_the_limit_is_students_over_the_number_of_points() -> None:
    # t(1 - 0.05/2, 9) and t(1 - 0.05/20, 9), from tables
    assert student_limit(10, 1) == pytest.approx(2.262, abs=1e-3)
    assert student_limit(10, 10) == pytest.approx(3.690, abs=1e-3)


def test_each_run_is_held_against_the_others() -> None:
    values = np.array([[1.0], [2.0], [3.0], [10.0]])
    found = left_out(values, np.zeros(1))
    # 1, 2, 3 have mean 2 and standard deviation 1; a further value has √(1 + 1/3) of that.
    assert found[3] == pytest.approx(8 / np.sqrt(4 / 3))


@pytest.mark.parametrize(("scale", "value", "samples"), [("log", 0.3, 0), ("logit", 98.6, 359), ("linear", -2.0, 0)])
def test_scales_are_undone(scale: str, value: float, samples: int) -> None:
    assert from_scale(scale, float(to_scale(scale, np.array(value), samples)), samples) == pytest.approx(value)


def test_an_accuracy_of_all_samples_is_finite_and_one_sample_is_within_the_spread() -> None:
    all_right = to_scale("logit", np.array([[100.0], [100.0]]), 359)
    assert np.isfinite(all_right).all()
    one_wrong = to_scale("logit", np.array([100.0 * 358 / 359]), 359)
    assert abs(deviations(one_wrong, all_right, least_spread("logit", all_right, 359)))[0] < 1.5
