"""What numbers are taken of a run's records?"""

from __future__ import annotations

from typing import Any

import pytest

from paceline.insight.bands.curves import Curve, curves_of, windows_of


def _steps(every: int, last: int) -> list[dict[str, Any]]:
    """The loss of step n is n; a record has the mean since the one before."""
    return [
        {"event": "step", "step": step, "loss": step - (every - 1) / 2, "lr": step / 100, "grad_norm": 2.0}
        for step in range(every, last + 1, every)
    ]


def _curve(events: list[dict[str, Any]], name: str, headline: str = "loss") -> Curve:
    return next(each for each in curves_of(events, 320, headline) if each.name == name)


def test_windows_follow_one_another_to_the_end() -> None:
    assert windows_of(320) == [(0, 20), (20, 40), (40, 80), (80, 160), (160, 240), (240, 320)]


@pytest.mark.parametrize("every", [1, 5, 20])
def test_how_often_a_run_writes_does_not_matter(every: int) -> None:
    events = _steps(every, 320)
    assert _curve(events, "training loss").values == pytest.approx((10.5, 30.5, 60.5, 120.5, 200.5, 280.5))
    assert _curve(events, "learning rate").values == pytest.approx((0.2, 0.4, 0.8, 1.6, 2.4, 3.2))


def test_a_record_that_reaches_over_a_window_counts_by_its_steps_in_it() -> None:
    events = [*_steps(15, 315), {"event": "step", "step": 320, "loss": 1.0, "lr": 0.0, "grad_norm": 1.0}]
    # Steps 1 to 15 have the mean 8; five of those of mean 23 follow.
    assert _curve(events, "training loss").values[0] == pytest.approx((15 * 8 + 5 * 23) / 20)
    assert _curve(events, "learning rate").values[0] == pytest.approx(0.2)


def test_records_that_reach_far_beyond_a_window_say_nothing_of_it() -> None:
    values = _curve(_steps(40, 320), "training loss").values
    assert [each is None for each in values] == [True, True, False, False, False, False]


def test_a_window_that_is_not_over_has_no_number() -> None:
    values = _curve(_steps(10, 70), "training loss").values
    assert [each is None for each in values] == [False, False, True, True, True, True]
    assert all(each is None for each in _curve(_steps(10, 10), "training loss").values)


def test_losses_that_are_no_numbers_are_left_out() -> None:
    events = _steps(10, 320)
    events[0]["loss"] = None
    assert _curve(events, "training loss").values[0] == pytest.approx(15.5)
    events[1]["loss"] = None
    assert _curve(events, "training loss").values[0] is None


def test_the_last_evaluation_of_a_window_counts_and_early_ones_do_not() -> None:
    scored = [
        {"event": "evaluation", "step": step, "weights": "ema", "samples": 50, "loss": 1.0, "top1_accuracy": step / 10}
        for step in range(20, 321, 20)
    ]
    curve = _curve([*_steps(10, 320), *scored], "top-1 accuracy, ema weights", headline="top1_accuracy")
    assert curve.values == (None, None, 8.0, 16.0, 24.0, 32.0)
    assert (curve.scale, curve.samples) == ("logit", 50)
