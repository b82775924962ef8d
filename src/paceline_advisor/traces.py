"""Traces of the charts of several studies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from paceline_advisor import Json


def trace(mode: str, name: str, points: Iterable[Sequence[Any]], **more: Any) -> Json:
    """Return a Plotly trace through points, each x and y.

    Args:
        mode: ``lines``, ``markers`` or ``lines+markers``.
        name: Its name in the legend.
        points: The points, in order.
        more: Other settings of Plotly.
    """
    pairs = list(points)
    return {"mode": mode, "name": name, "x": [each[0] for each in pairs], "y": [each[1] for each in pairs], **more}


def error_bars(intervals: Iterable[tuple[float, float, float]]) -> Json:
    """Return Plotly's error bars of intervals, each low, middle and high; an infinite end has no bar."""
    ends = [(middle - low, high - middle) for low, middle, high in intervals]
    below, above = ([each[side] if math.isfinite(each[side]) else None for each in ends] for side in (0, 1))
    return {"array": above, "arrayminus": below}
