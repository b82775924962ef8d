"""A plot without a plotting library: lines of figures with their intervals over batch sizes, as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

# Of Okabe and Ito (2008), told apart by the colour-blind too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_LEFT, _TOP, _WIDTH, _HEIGHT, _LINE = 80, 40, 520, 300, 18
_TICKS = 5

Point = tuple[float, float, float]
"""Middle, low and high."""


def line_plot(title: str, unit: str, columns: Sequence[str], lines: Mapping[str, Sequence[Point | None]]) -> str:
    """Draw one line for each name.

    Args:
        title: Above it.
        unit: Of the figures.
        columns: Below it, from left to right.
        lines: For each name a point in each column, or None; an end that is not finite has no whisker.
    """
    points = [point for line in lines.values() for point in line if point is not None]
    highest = max((high if math.isfinite(high) else middle for middle, _, high in points), default=1.0)
    step = _round_step(highest / _TICKS)
    top = step * math.ceil(highest / step) or 1.0

    def x(column: int) -> float:
        return _LEFT + _WIDTH * (column + 0.5) / max(1, len(columns))

    def y(value: float) -> float:
        return _TOP + _HEIGHT * (1 - min(max(value, 0.0), top) / top)

    height = _TOP + _HEIGHT + 60 + _LINE * len(lines)
    size = f'width="{_LEFT + _WIDTH + 20}" height="{height}"'
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">{escape(title)} ({escape(unit)})</text>',
    ]
    for tick in range(round(top / step) + 1):
        at = y(tick * step)
        drawn.append(f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        drawn.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{tick * step:,.4g}</text>')
    for column, name in enumerate(columns):
        drawn.append(f'<text x="{x(column):.1f}" y="{_TOP + _HEIGHT + 18}" text-anchor="middle">{escape(name)}</text>')
    for index, (name, line) in enumerate(lines.items()):
        colour, below = _COLOURS[index % len(_COLOURS)], _TOP + _HEIGHT + 48 + _LINE * index
        drawn += _line(line, colour, x, y)
        drawn.append(f'<rect x="{_LEFT}" y="{below - 9}" width="14" height="9" fill="{colour}"/>')
        drawn.append(f'<text x="{_LEFT + 20}" y="{below}">{escape(name)}</text>')
    return "\n".join([*drawn, "</svg>", ""])


def _line(
    line: Sequence[Point | None], colour: str, x: Callable[[int], float], y: Callable[[float], float]
) -> list[str]:
    at = [(x(column), point) for column, point in enumerate(line) if point is not None]
    path = " ".join(f"{left:.1f},{y(point[0]):.1f}" for left, point in at)
    drawn = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>']
    for left, (middle, low, high) in at:
        drawn.append(f'<circle cx="{left:.1f}" cy="{y(middle):.1f}" r="3.5" fill="{colour}"/>')
        if math.isfinite(low) and math.isfinite(high):
            ends = f'x1="{left:.1f}" x2="{left:.1f}" y1="{y(low):.1f}" y2="{y(high):.1f}"'
            drawn.append(f'<line {ends} stroke="{colour}"/>')
    return drawn


def _round_step(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, ..."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value * (1 - 1e-9))
