"""Errors of numbers are scikit-learn's, to the last digits, however the samples are shared out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error

from paceline.metrics.regression import NumberErrors, error_metrics, identifier_names

Numbers = NDArray[np.float64]


def measured(targets: Numbers, found: Numbers, shares: list[list[int]], **of: list[float]) -> dict[str, float]:
    """The metrics of standardised numbers [batches, N, columns], of which each process scores a share."""
    columns = [f"c{place}" for place in range(targets.shape[2])]
    parts = []
    for share in shares:
        errors = collector(columns, **of)
        for batch in share:
            target, answer = (torch.from_numpy(each[batch]) for each in (targets, found))
            errors.add({"error": answer - target, "target": target}, np.arange(len(target)))
        parts.append(errors.part())
    return collector(columns, **of).results(parts)


def collector(columns: list[str], **of: list[float]) -> NumberErrors:
    return NumberErrors(columns, of.get("scale", [1.0] * len(columns)), of.get("mean", [0.0] * len(columns)))


@pytest.mark.parametrize("columns", [1, 3])
def test_they_are_scikit_learns_over_any_processes(columns: int) -> None:
    draws = np.random.default_rng(columns)
    mean, scale = draws.uniform(-1e4, 1e4, columns), draws.uniform(1e-3, 1e3, columns)
    targets = draws.normal(size=(7, 16, columns))
    found = targets + draws.normal(size=targets.shape) * 0.3
    one = measured(targets, found, [list(range(7))], scale=scale.tolist())
    for shares in ([[0, 3, 6], [1, 4], [2, 5]], [[], [6, 5, 4, 3, 2, 1, 0]]):
        assert measured(targets, found, shares, scale=scale.tolist()) == one
    true, said = (each.reshape(-1, columns) * scale + mean for each in (targets, found))
    wanted = {
        "mae": mean_absolute_error(true, said),
        "rmse": root_mean_squared_error(true, said),
        "r2": r2_score(true, said),
    }
    assert {name: one[name] for name in wanted} == pytest.approx(wanted, rel=1e-9)
    for place in range(columns if columns > 1 else 0):
        own = mean_absolute_error(true[:, place], said[:, place]), r2_score(true[:, place], said[:, place])
        assert (one[f"mae_c{place}"], one[f"r2_c{place}"]) == pytest.approx(own, rel=1e-9)
    assert [metric.name for metric in error_metrics([f"c{place}" for place in range(columns)])] == list(one)


@pytest.mark.parametrize(("error", "r2"), [(0.0, 1.0), (0.5, 0.0)])
def test_equal_targets_have_scikit_learns_r2(error: float, r2: float) -> None:
    targets = np.ones((1, 4, 1))
    assert r2_score(targets[0], targets[0] + error) == r2
    for each in (targets, np.full((1, 7, 1), 0.1)):  # whose sums are not exact
        found = measured(each, each + error, [[0]])
        assert (found["r2"], found["mae"]) == (r2, pytest.approx(error))


def test_an_answer_that_is_not_finite_is_not_a_result() -> None:
    targets = np.zeros((1, 4, 1))
    found = np.full_like(targets, math.inf)
    assert not any(map(math.isfinite, measured(targets, found, [[0]]).values()))
    assert all(map(math.isnan, measured(targets, found, [[]]).values()))


def test_names_of_columns_become_names_of_metrics() -> None:
    assert identifier_names(["weight kg", "größe"]) == ("weight_kg", "größe")
    assert identifier_names(["a b", "a-b"]) == ("column0", "column1")


def test_the_pairs_that_are_kept_are_in_units_and_the_same_over_any_processes() -> None:
    targets, found = np.random.default_rng(0).normal(size=(2, 30, 50, 2))

    def kept(shares: list[list[int]]) -> dict[str, Any]:
        parts = []
        for share in shares:
            errors = NumberErrors(["a", "b"], [2, 1], [10, 0])
            for batch in share:
                target, answer = (torch.from_numpy(each[batch]) for each in (targets, found))
                errors.add({"error": answer - target, "target": target}, np.arange(50 * batch, 50 * batch + 50))
            parts.append(errors.part())
        return NumberErrors(["a", "b"], [2, 1], [10, 0]).details(parts)

    one = kept([list(range(30))])
    assert one == kept([list(range(0, 30, 2)), list(range(29, 0, -2)), []])
    assert (one["columns"], len(one["points"])) == (["a", "b"], 1000)
    for point in one["points"]:
        batch, at = divmod(point["sample"], 50)
        assert point["actual"] == pytest.approx(targets[batch, at] * [2, 1] + [10, 0], rel=1e-5, abs=1e-5)
        assert point["predicted"] == pytest.approx(found[batch, at] * [2, 1] + [10, 0], rel=1e-5, abs=1e-5)
