"""A duration survives being written down, and comes to the right number of steps."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.units import Duration, format_bytes, format_count, format_seconds

UNITS = st.sampled_from(["epochs", "steps", "samples", "percent"])
VALUES = st.one_of(
    st.integers(0, 10**12).map(float),
    st.floats(min_value=0, max_value=1e12, allow_nan=False),
)


def steps(text: str, *, samples: int = 100, batch: int = 16, total: int | None = None) -> int:
    return Duration.parse(text).to_steps(samples_per_epoch=samples, global_batch_size=batch, total_steps=total)


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("3 epochs", 3, "epochs"),
        ("1 epoch", 1, "epochs"),
        ("0.5 epochs", 0.5, "epochs"),
        (".5 epochs", 0.5, "epochs"),
        ("500steps", 500, "steps"),
        ("  1 step ", 1, "steps"),
        ("100000 samples", 100_000, "samples"),
        ("10%", 10, "percent"),
        ("2.5 percent", 2.5, "percent"),
    ],
)
def test_spellings(text: str, value: float, unit: str) -> None:
    assert Duration.parse(text) == Duration(value, unit)


@pytest.mark.parametrize(
    "text", ["3", "3 epoch s", "3 minutes", "epochs", "-3 epochs", "3, epochs", "", "1 2 steps", "nan steps"]
)
def test_anything_else_is_refused_with_the_rule(text: str) -> None:
    with pytest.raises(ValueError, match=r"found .* a duration is a number with its unit: '3 epochs', '500 steps'"):
        Duration.parse(text)


@pytest.mark.parametrize("value", [3, 3.0, None, True, ["3 epochs"]])
def test_a_number_without_a_unit_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="its unit"):
        Duration.parse(value)


@given(VALUES, UNITS)
def test_written_and_read_it_is_the_same(value: float, unit: str) -> None:
    duration = Duration(value, unit)  # type: ignore[arg-type]
    assert Duration.parse(str(duration)) == duration


@pytest.mark.parametrize(
    ("duration", "text"),
    [
        (Duration(1, "epochs"), "1 epoch"),
        (Duration(3, "epochs"), "3 epochs"),
        (Duration(1_281_167, "samples"), "1281167 samples"),
        (Duration(10, "percent"), "10%"),
        (Duration(2.5, "steps"), "2.5 steps"),
    ],
)
def test_written_for_people(duration: Duration, text: str) -> None:
    assert str(duration) == text


def test_an_epoch_is_whole_with_its_smaller_last_step() -> None:
    assert steps("1 epoch", samples=100, batch=16) == 7
    assert steps("1 epoch", samples=96, batch=16) == 6
    assert steps("2 epochs", samples=5, batch=16) == 2


@given(samples=st.integers(1, 500), batch=st.integers(1, 64), wanted=st.integers(0, 2000))
def test_samples_are_enough_steps_to_use_them_and_not_one_more(samples: int, batch: int, wanted: int) -> None:
    def used(count: int) -> int:
        per_epoch = math.ceil(samples / batch)
        return count // per_epoch * samples + count % per_epoch * batch

    count = steps(f"{wanted} samples", samples=samples, batch=batch)
    assert used(count) >= wanted
    assert count == 0 or used(count - 1) < wanted


def test_a_percentage_is_of_the_whole_run() -> None:
    assert steps("10%", total=70) == 7
    assert steps("100%", total=70) == 70


def test_a_percentage_of_nothing_known_is_refused() -> None:
    with pytest.raises(ValueError, match="found '10%', but the run's own length cannot be a percentage"):
        steps("10%")


def test_half_an_epoch_is_rounded_to_a_step() -> None:
    assert steps("0.5 epochs", samples=100, batch=16) in (3, 4)
    assert steps("0.01 epochs", samples=100, batch=16) == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.421, "0.42 s"),
        (12.34, "12.3 s"),
        (59.9, "59.9 s"),
        (59.99, "1 min 00 s"),
        (245, "4 min 05 s"),
        (3599.7, "1 h 00 min"),
        (12_000, "3 h 20 min"),
    ],
)
def test_time_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(512, "512 B"), (1536, "1.5 KiB"), (147 * 2**20, "147 MiB"), (2**40, "1024 GiB")],
)
def test_sizes_for_people(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_counts_for_people() -> None:
    assert format_count(1_281_167) == "1,281,167"
