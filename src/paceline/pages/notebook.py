"""Output of a notebook's cell: blocks with their own style, and line charts as SVG, since no script runs there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from paceline.pages.blocks import Block
from paceline.pages.charts import sample_evenly
from paceline.parsing.plain_text import html_text

_STYLE = (
    ".paceline svg {max-width: 100%; margin: 4px 24px 4px 0} .paceline caption {text-align: left} "
    ".paceline .gallery {display: flex; flex-wrap: wrap; gap: 14px; list-style: none; margin: 0; padding: 0} "
    ".paceline .gallery li, .paceline figure {margin: 0; width: 140px} .paceline figure img {width: 100%}"
)
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 440, 250, 56, 16, 52, 40
# A contrast of at least 3 to white and to black; the second line is dashed too.
_STROKES = ('stroke="#2f80d0"', 'stroke="#d2691e" stroke-dasharray="7 3"')
_MOST_POINTS, _TICKS = 400, 4


def notebook_html(*blocks: Block) -> str:
    """Return blocks as the output of a cell."""
    content = "".join(part for block in blocks for part in block.html())
    return f'<div class="paceline"><style>{_STYLE}</style>{content}</div>'


@dataclass(frozen=True, kw_only=True)
class LineChart:
    """One or two lines over steps with axes, numbers and a legend with the last values.

    Text and axes have the colour of the surrounding text, so that they are readable on light and dark pages.

    Attributes:
        title: What the values are, with the unit.
        lines: Points (step, value) of each line by name; one without points keeps its colour free.
    """

    title: str
    lines: Mapping[str, Sequence[tuple[float, float]]]

    def html(self) -> Iterator[str]:
        """Return an SVG element; nothing without points."""
        lines = [each for each in zip(self.lines.items(), _STROKES, strict=False) if each[0][1]]
        if not lines:
            return
        xs, ys = (_axis([point[at] for (_, points), _ in lines for point in points]) for at in range(2))
        width, height, title = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM, html_text(self.title)

        def place(x: float, y: float) -> tuple[float, float]:
            right, up = ((value - axis[0]) / (axis[-1] - axis[0]) for value, axis in ((x, xs), (y, ys)))
            return round(_LEFT + width * right, 1), round(_TOP + height * (1 - up), 1)

        yield f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" aria-label="{title} by step" '
        yield 'font-size="12" font-family="sans-serif" fill="currentColor">'
        yield f'<text x="{_LEFT}" y="15" font-size="14" font-weight="bold">{title}</text>'
        yield f'<text x="{_LEFT + width / 2}" y="{_HEIGHT - 4}" text-anchor="middle">step</text>'
        for value in ys:
            left, y = place(xs[0], value)
            yield f'<path d="M{left} {y}h{width}" stroke="currentColor" stroke-opacity=".2"/>'
            yield f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{value:,.6g}</text>'
        for value in xs:
            x, bottom = place(value, ys[0])
            yield f'<text x="{x}" y="{bottom + 17}" text-anchor="middle">{value:,.6g}</text>'
        at = _LEFT
        for (name, points), stroke in lines:
            shown = (place(*points[index]) for index in sample_evenly(len(points), _MOST_POINTS))
            legend = f"{name} {points[-1][1]:.4g}"
            yield f'<polyline points="{" ".join(f"{x},{y}" for x, y in shown)}" fill="none" stroke-width="2" {stroke}/>'
            yield f'<path d="M{at} 35h24" stroke-width="3" {stroke}/>'
            yield f'<text x="{at + 29}" y="39">{html_text(legend)}</text>'
            at += 45 + 7 * len(legend)
        yield "</svg>"


def _axis(values: Sequence[float]) -> list[float]:
    """Return round numbers at equal distances around the values."""
    low, high = min(values), max(values)
    if low == high:
        low -= abs(low) / 10 or 1
    step = 10.0 ** math.floor(math.log10((high - low) / _TICKS))
    step *= next((factor for factor in (1, 2, 5) if high - low <= step * factor * (_TICKS + 1)), 10)
    return [step * number for number in range(math.floor(low / step), math.ceil(high / step) + 1)]
