"""Which points of a long curve are drawn, so that a page stays small and no spike is lost?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeGuard

Number = float | int | None


def thinned(values: Sequence[Number], most: int) -> list[int]:
    """The places of points that show a curve: of each stretch its lowest and highest, its ends, and a gap in it.

    Every point shown is one of the curve's own; nothing is averaged.

    Args:
        values: The curve; None where it has a gap.
        most: About so many points; at least eight.
    """
    count = len(values)
    if count <= most:
        return list(range(count))
    # A stretch gives at most five points, mostly four.
    stretches = max(2, most // 4)
    places = {0, count - 1}
    for index in range(stretches):
        first, end = index * count // stretches, (index + 1) * count // stretches
        if first < end:
            places |= _telling(values, first, end)
    return sorted(places)


def _telling(values: Sequence[Number], first: int, end: int) -> set[int]:
    known = [(value, at) for at, value in enumerate(values[first:end], start=first) if _is_number(value)]
    if not known:
        return {first}
    gaps = [at for at in range(first, end) if not _is_number(values[at])]
    return {known[0][1], known[-1][1], min(known)[1], max(known)[1], *gaps[:1]}


def _is_number(value: Number) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)
