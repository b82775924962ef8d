"""No spike is lost, no point is made up."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from paceline.reports.html.training import downsample

VALUE = st.one_of(st.none(), st.floats(allow_nan=False, width=32), st.just(math.nan))
VALUES = st.lists(VALUE, max_size=400)


@given(VALUES, st.integers(8, 100))
def test_points_are_the_curves_own_in_order_and_few(values: list[float | None], most: int) -> None:
    places = downsample(values, most)
    assert places == sorted(set(places))
    assert all(0 <= place < len(values) for place in places)
    assert len(places) <= 5 * most / 4 + 2
    if len(values) <= most:
        assert len(places) == len(values)


@given(st.lists(VALUE, min_size=40, max_size=200), st.integers(8, 12))
def test_the_ends_and_extremes_are_among_them(values: list[float | None], most: int) -> None:
    places = downsample(values, most)
    known = [value for value in values if value is not None and math.isfinite(value)]
    shown = [values[place] for place in places]
    if values:
        assert {0, len(values) - 1} <= set(places)
    if known:
        assert {min(known), max(known)} <= set(shown)
    # A gap shows where there is one.
    assert (len(known) < len(values)) == any(value is None or not math.isfinite(value) for value in shown)


def test_every_lone_spike_survives() -> None:
    values = [1.0] * 100_000
    spikes = range(123, 100_000, 1009)
    for place in spikes:
        values[place] = 50.0
    places = downsample(values, 4000)
    assert set(spikes) <= set(places)
    assert len(places) <= 4000
