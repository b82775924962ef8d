"""How does a curve look in a terminal? Dots of Braille letters, eight to a character, or stars where there are none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Points = Sequence[tuple[float, float]]

# Bits of a Braille character by row and column of its dots.
_BITS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
_EMPTY = 0x2800


def draw_chart(points: Points, *, width: int, height: int, has_braille: bool = True) -> list[str]:
    """Draw a curve, with the highest and the lowest value at its left and the first and last place below.

    Args:
        points: (place, value) in ascending order; values that are no numbers are left out.
        width: Columns in all.
        height: Rows of the curve itself; one more says the places.
        has_braille: Whether the terminal shows Braille letters.
    """
    known = np.array([each for each in points if np.isfinite(each[1])], dtype=np.float64).reshape(-1, 2)
    if len(known) == 0:
        return ["(nothing yet)"]
    low, high = float(known[:, 1].min()), float(known[:, 1].max())
    labels = [f"{high:.4g}", f"{low:.4g}"]
    margin = max(map(len, labels)) + 1
    columns = max(4, width - margin)
    dots = _dots(known, low, high, columns * 2, height * 4)
    rows = _braille(dots) if has_braille else _stars(dots)
    left = [labels[0], *[""] * (height - 2), labels[1]] if height > 1 else labels[:1]
    first, last = f"{known[0, 0]:g}", f"{known[-1, 0]:g}"
    below = f"{first}{last:>{max(1, columns - len(first))}}" if len(known) > 1 else first
    body = [f"{label:>{margin - 1}} {row}" for label, row in zip(left, rows, strict=True)]
    return [*body, f"{'':{margin}}{below}"]


def _dots(known: NDArray[np.float64], low: float, high: float, columns: int, rows: int) -> NDArray[np.bool_]:
    """Which dots are on, [rows, columns]: between neighbours a line, and where many share a column all they span."""
    first, last = known[0, 0], known[-1, 0]
    places = np.zeros(len(known)) if last == first else (known[:, 0] - first) / (last - first) * (columns - 1)
    heights = np.full(len(known), 0.5) if high == low else (known[:, 1] - low) / (high - low)
    at = np.round((1 - heights) * (rows - 1)).astype(int)
    between = np.arange(int(places[-1]) + 1)
    line = np.round(np.interp(between, places, at)).astype(int)
    dots = np.zeros((rows, columns), dtype=np.bool_)
    for column, (here, there) in enumerate(zip(line, np.append(line[1:], line[-1]), strict=True)):
        dots[min(here, there) : max(here, there) + 1, column] = True
    for column, row in zip(np.round(places).astype(int), at, strict=True):
        dots[row, column] = True
    return dots


def _braille(dots: NDArray[np.bool_]) -> list[str]:
    rows, columns = dots.shape
    cells = dots.reshape(rows // 4, 4, columns // 2, 2).transpose(0, 2, 1, 3)
    codes = (cells * _BITS).sum(axis=(2, 3)) + _EMPTY
    return ["".join(map(chr, row)) for row in codes.tolist()]


def _stars(dots: NDArray[np.bool_]) -> list[str]:
    rows, columns = dots.shape
    cells = dots.reshape(rows // 4, 4, columns // 2, 2).sum(axis=(1, 3))
    return ["".join("*" if cell else " " for cell in row) for row in cells.tolist()]
