"""Lengths of training with their unit, and numbers written for people."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.parsing.units import (
    Duration,
    TimeSpan,
    format_bytes,
    format_count,
    format_metric,
    format_seconds,
    format_si,
    metric_title,
    metric_unit,
)

LENGTHS = {
    "epochs": {"3 epochs": 3, "1 epoch": 1, "0.5 epochs": 0.5, ".5 epochs": 0.5},
    "steps": {"500 steps": 500, " 500steps ": 500, "1e3 steps": 1000},
    "samples": {"100000 samples": 100_000},
    "percent": {"10%": 10, "10 percent": 10},
}


@pytest.mark.parametrize("unit", LENGTHS)
def test_a_length_is_read(unit: Any) -> None:
    for text, value in LENGTHS[unit].items():
        assert Duration.parse(text) == Duration(value, unit)


@pytest.mark.parametrize("found", ["3", "epochs", "-3 steps", "3 weeks", "", "3 epochs 2 steps", 3, None, 1.5])
def test_what_is_no_length_is_refused_with_the_rule(found: object) -> None:
    with pytest.raises(ValueError, match=r"'3 epochs', '500 steps', '100000 samples' or '10%'"):
        Duration.parse(found)


@given(
    st.integers(0, 10**12).map(float) | st.floats(min_value=0, max_value=1e12, allow_nan=False),
    st.sampled_from(["epochs", "steps", "samples", "percent"]),
)
def test_what_is_written_is_read(value: float, unit: str) -> None:
    length = Duration(value, unit)  # type: ignore[arg-type]
    assert Duration.parse(str(length)) == length


STEPS = {
    "epochs": {3: 18, 0.5: 3},
    "steps": {7: 7},
    "samples": {90: 6, 91: 7, 81: 6, 80: 5, 1: 1},
    "percent": {25: 50, 0.1: 0},
}


@pytest.mark.parametrize("unit", STEPS)
def test_whole_steps(unit: Any) -> None:
    """90 samples in 6 steps an epoch, the last of 10; 200 steps in all."""
    for value, steps in STEPS[unit].items():
        length = Duration(value, unit)
        assert length.to_steps(samples_per_epoch=90, global_batch_size=16, total_steps=200) == steps, value


@given(samples=st.integers(1, 500), batch=st.integers(1, 64), expected=st.integers(0, 2000))
def test_samples_are_enough_steps_to_use_them_and_not_one_more(samples: int, batch: int, expected: int) -> None:
    def used(count: int) -> int:
        per_epoch = math.ceil(samples / batch)
        return count // per_epoch * samples + count % per_epoch * batch

    count = Duration(expected, "samples").to_steps(samples_per_epoch=samples, global_batch_size=batch)
    assert used(count) >= expected
    assert count == 0 or used(count - 1) < expected


def test_a_share_of_an_unknown_whole_is_refused() -> None:
    with pytest.raises(ValueError, match="10%"):
        Duration(10, "percent").to_steps(samples_per_epoch=90, global_batch_size=16)


TIMES = {0: "0.00 s", 0.424: "0.42 s", 12.34: "12.3 s", 59.99: "1 min 00 s", 60: "1 min 00 s", 245: "4 min 05 s"}
TIMES |= {3599.7: "1 h 00 min", 12_000: "3 h 20 min", 360_000: "100 h 00 min"}
SIZES = {0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 154_140_672: "147 MiB", 1024**2 - 1: "1.0 MiB"}
SIZES |= {5 * 1024**4: "5120 GiB"}
COUNTS = {0: "0", 4.0: "4", 0.662: "0.66", 999: "999", 1_281_167: "1,281,167", 12.6: "13"}


@pytest.mark.parametrize(
    ("written", "expected"), [(format_seconds, TIMES), (format_bytes, SIZES), (format_count, COUNTS)]
)
def test_numbers_for_people(written: Callable[[float], str], expected: dict[float, str]) -> None:
    assert {number: written(number) for number in expected} == expected


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (0.9343e9, "FLOP", "934 MFLOP"),
        (72.27e9, "FLOP/s", "72.3 GFLOP/s"),
        (999.7e9, "B/s", "1.00 TB/s"),
        (999.4e9, "B/s", "999 GB/s"),
        (99.96e6, "B", "100 MB"),
        (0.01646, "s", "16.5 ms"),
        (2.5e18, "FLOP", "2,500 PFLOP"),
        (0, "FLOP", "0.00 FLOP"),
        (2.84e-7, "s", "284 ns"),
    ],
)
def test_an_amount_has_three_digits_and_a_prefix(value: float, unit: str, expected: str) -> None:
    assert format_si(value, unit) == expected


@pytest.mark.parametrize(
    ("text", "seconds"), [("90 seconds", 90), ("1 second", 1), ("2s", 2), ("5m", 300), (".5 h", 1800), ("2d", 172800)]
)
def test_a_time_is_read_and_written(text: str, seconds: float) -> None:
    time = TimeSpan.parse(text)
    assert time.seconds == seconds
    assert TimeSpan.parse(str(time)) == time
    assert str(TimeSpan.parse("1 min")) == "1 minute"


@pytest.mark.parametrize("found", ["10", 10, "0 s", "-1 s", "3 epochs", "1e999 s", "40000 days", "5 M", "", None])
def test_what_is_no_time_is_refused_with_the_rule(found: object) -> None:
    with pytest.raises(ValueError, match="'90 seconds', '10 minutes' or '2 hours'"):
        TimeSpan.parse(found)


def test_only_accuracies_and_precisions_are_in_percent() -> None:
    percents = ("top1_accuracy", "box_map50", "map", "miou", "iou_sky")
    assert {metric_unit(each) for each in percents} == {"%"}
    assert [format_metric("accuracy", each) for each in (81.2, 0.8)] == ["81.20 %", "0.8"], "a share of one's own"
    assert not any(map(metric_unit, ("loss", "mae_accuracy", "rmse_map", "r2_map50", "mae_iou", "miou2")))
    assert [metric_title(each) for each in ("miou", "iou_sky", "box_map50", "micro_f1")] == [
        *("mIoU", "IoU sky", "box mAP50", "micro F1"),
    ]
