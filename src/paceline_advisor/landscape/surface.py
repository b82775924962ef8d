"""What is the loss along a line through the weights, and on a plane?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from torch import Tensor

from paceline_advisor.landscape.subject import Split, Subject

Point = dict[str, float]
Work = Callable[[], Any]
"""Something that one process computes; what it gives back is made of plain numbers."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Metrics along a line.

    Attributes:
        positions: Where, in lengths of the direction.
        values: Each metric at these positions; not finite where the loss was not.
    """

    positions: tuple[float, ...]
    values: Mapping[str, tuple[float, ...]]

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Surface:
    """Metrics on a plane.

    Attributes:
        x: Positions along the first direction.
        y: Positions along the second one.
        values: Each metric, row by row: ``values[name][i][j]`` is at ``(x[j], y[i])``.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]
    values: Mapping[str, tuple[tuple[float, ...], ...]]

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def positions(first: float, last: float, count: int) -> tuple[float, ...]:
    """So many evenly spaced numbers; the middle of an odd number of them between -r and r is exactly 0."""
    return tuple(float(each) for each in np.linspace(first, last, count))


def along(
    subject: Subject, weights: Tensor, directions: Sequence[Tensor], at: Sequence[Sequence[float]], on: Split
) -> list[Work]:
    """The work of measuring at some points.

    Args:
        subject: The network and its samples.
        weights: The origin, [size].
        directions: The axes, [size] each.
        at: For each point, how far it is along each axis.
        on: The split that is scored.
    """

    def measure(point: Sequence[float]) -> Point:
        moved = weights.clone()
        for share, direction in zip(point, directions, strict=True):
            moved.add_(direction, alpha=share)
        return subject.measure(moved, on)

    return [partial(measure, point) for point in at]


def on_grid(x: Sequence[float], y: Sequence[float]) -> list[tuple[float, float]]:
    """The points of a grid, row by row."""
    return [(across, up) for up, across in product(y, x)]


def curve_of(at: Sequence[float], found: Sequence[Point]) -> Curve:
    """Put the points of a line together."""
    return Curve(positions=tuple(at), values={name: tuple(each[name] for each in found) for name in found[0]})


def surface_of(x: Sequence[float], y: Sequence[float], found: Sequence[Point]) -> Surface:
    """Put the points of :func:`on_grid` together."""
    rows = [found[begin : begin + len(x)] for begin in range(0, len(found), len(x))]
    values = {name: tuple(tuple(each[name] for each in row) for row in rows) for name in found[0]}
    return Surface(x=tuple(x), y=tuple(y), values=values)
