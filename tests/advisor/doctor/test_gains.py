"""Which change is worth making, by what was measured; and what is written of it."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import RecipeError
from paceline.recipe.schema import Recipe
from paceline_advisor.apply import check_new
from paceline_advisor.bench.interleaved import Measurement, Round, Variant
from paceline_advisor.doctor.findings import Advice, Finding, Gain, Severity, ranked
from paceline_advisor.doctor.study import gain_of, worthwhile, write_improved

CERTAIN = Gain(middle=1.2, low=1.1, high=1.3, rounds=8)
DOUBTFUL = Gain(middle=1.02, low=0.98, high=1.06, rounds=8)


def finding(name: str, severity: Severity = "slows", *, gain: Gain | None = None, **changes: Any) -> Finding:
    advice = Advice(words="change it", overrides={"telemetry.log_every": "10 steps"}, **changes)
    given = dict.fromkeys(("evidence", "why", "source", "expected"), "said")
    return Finding(name=name, severity=severity, advice=advice, gain=gain, **given)


def measured(seconds: list[float]) -> Measurement:
    rounds = [Round(steps=1, samples=100, seconds=each, phases={}) for each in seconds]
    return Measurement(variant=Variant(recipe=Recipe()), rounds=rounds)


def test_a_gain_is_the_ratio_of_the_rounds() -> None:
    gain = gain_of(measured([2.0, 4.0, 3.0, 2.2]), measured([1.0, 2.0, 1.5, 1.1]))
    assert gain is not None
    assert (gain.middle, gain.low, gain.high, gain.rounds) == pytest.approx((2, 2, 2, 4))
    assert gain.is_certain
    assert gain_of(measured([]), measured([1.0])) is None


def test_another_measurement_lies_in_the_interval_as_often_as_is_said() -> None:
    draws = random.Random(0)

    def measure() -> Gain:
        pairs = [(draws.gauss(1.1, 0.05), draws.gauss(1.0, 0.05)) for _ in range(6)]
        gain = gain_of(measured([now for now, _ in pairs]), measured([changed for _, changed in pairs]))
        assert gain is not None
        return gain

    inside = []
    for _ in range(400):
        first, second = measure(), measure()
        inside.append(first.low <= second.middle <= first.high)
    assert statistics.mean(inside) == pytest.approx(0.95, abs=0.025)


def test_what_is_sure_comes_before_what_is_expected_and_no_gain_comes_last() -> None:
    given = [
        finding("doubtful", gain=DOUBTFUL),
        finding("expected"),
        finding("small", gain=replace(CERTAIN, middle=1.15)),
        finding("large", gain=CERTAIN),
        finding("broken", "breaks"),
        finding("meant", "notice"),
    ]
    assert [each.name for each in ranked(given)] == ["broken", "large", "small", "expected", "meant", "doubtful"]


def test_no_gain_is_said_to_be_none() -> None:
    assert str(DOUBTFUL).startswith("no gain measured: 1.020 (0.980 to 1.060, 8 rounds)")
    assert str(CERTAIN) == "1.200 (1.100 to 1.300, 8 rounds) times as fast"
    assert not finding("doubtful", gain=DOUBTFUL).counts
    assert finding("certain", gain=CERTAIN).counts


def test_only_what_trains_the_same_is_worthwhile() -> None:
    given = (
        finding("same"),
        finding("rounds", keeps="rounding", gain=CERTAIN),
        finding("another", keeps="training", gain=CERTAIN),
        finding("doubtful", gain=DOUBTFUL),
        replace(finding("code"), advice=Advice(words="in your code")),
    )
    assert [each.name for each in worthwhile(given, measured=False)] == ["same", "rounds", "doubtful"]
    assert [each.name for each in worthwhile(given, measured=True)] == ["rounds"]


def test_a_file_that_is_there_stays(examined: Callable[..., Any], tmp_path: Path) -> None:
    diagnosis = examined({"telemetry.log_every": "1 step"}, device="a100")
    path = tmp_path / "better.yaml"
    made = write_improved(path, diagnosis, measured=False)
    assert [each.name for each in made.met] == ["log_every_step"]
    assert made.lines == ('- telemetry.log_every="1 step"', '+ telemetry.log_every="10 steps"')
    before = path.read_text()
    for refused in (check_new, lambda path: write_improved(path, diagnosis, measured=False)):
        with pytest.raises(RecipeError, match=r"better\.yaml"):
            refused(path)
    assert path.read_text() == before
