"""What a notebook's cell shows: charts with axes and numbers, and nothing that breaks out of its text."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.pages.notebook import LineChart, _axis, notebook_html

FINITE = st.floats(-1e30, 1e30, allow_subnormal=False)


def drawn(chart: LineChart) -> ET.Element:
    return ET.fromstring("".join(chart.html()))


def test_a_chart_has_a_title_axes_and_last_values() -> None:
    lines = {"training": [(1, 2.0), (40, 0.52)], "held-out <b>": [(20, 1.1), (40, 0.731)]}
    svg = drawn(LineChart(title="loss", lines=lines))
    texts = [each.text for each in svg.iter("text")]
    assert {"loss", "step", "training 0.52", "held-out <b> 0.731", "0.5", "2", "40"} <= {*texts}
    assert len([*svg.iter("polyline")]) == 2
    assert svg.get("fill") == "currentColor"


def test_points_lie_where_the_axes_say() -> None:
    (line,) = drawn(LineChart(title="loss", lines={"training": [(0, 0.0), (50, 5.0), (100, 10.0)]})).iter("polyline")
    (x0, y0), (x1, y1), (x2, y2) = [map(float, each.split(",")) for each in str(line.get("points")).split()]
    assert (x1 - x0, y1 - y0) == pytest.approx(((x2 - x0) / 2, (y2 - y0) / 2), abs=0.1)
    assert y2 < y0


def test_a_long_run_keeps_its_first_and_last_point() -> None:
    points = [(step, 1 / (1 + step)) for step in range(10_000)]
    svg = "".join(LineChart(title="loss", lines={"training": points}).html())
    assert len(svg) < 10_000
    assert "training 0.0001" in svg


@given(st.lists(FINITE, min_size=1, max_size=5))
def test_an_axis_contains_its_values_and_has_few_ticks(values: list[float]) -> None:
    axis = _axis(values)
    beyond = 1e-300  # what is lost in a step's multiple
    assert axis[0] <= min(values) + beyond
    assert axis[-1] >= max(values) - beyond
    assert axis[-1] > axis[0]
    assert len(axis) <= 7


def test_a_value_that_never_changes_is_a_line_in_the_chart() -> None:
    assert _axis([95.0, 95.0]) == [84, 86, 88, 90, 92, 94, 96]


def test_without_points_there_is_no_chart() -> None:
    assert re.fullmatch(
        r'<div class="paceline"><style>[^<]*</style></div>', notebook_html(LineChart(title="a", lines={}))
    )
