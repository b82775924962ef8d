"""Plausibility of COCO's annotations: boxes and outlines beyond their picture, below a pixel, or in another format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError

Edges = NDArray[np.float64]
"""Left, top, right and bottom of each box or outline, [N, 4]."""
Entries = Sequence[Mapping[str, Any]]
Flags = Any
"""bool [N]; numpy has no type for ``all(axis=1)``."""

_TOLERANCE = 1.0  # pixels, for coordinates rounded to whole ones
_LEAST_SIDE = 0.99
_EXPLAINED = 0.95  # share of the boxes that another format must explain


def implausible(file: Path, entries: Entries, sides: Edges, outlines: Edges | None) -> list[str]:
    """Return a sentence for each kind of implausible annotation, with its count and the first one.

    Args:
        file: The annotation file, for messages.
        entries: Its valid annotations.
        sides: Width and height of each one's picture, [N, 2].
        outlines: Edges of each one's outline; None if masks are not read.

    Raises:
        DataError: If most boxes or most outlines are implausible.
    """
    if not entries:
        return []
    stored = np.array([each["bbox"] for each in entries], dtype=np.float64)
    corner, size = stored[:, :2], stored[:, 2:]
    boxes = np.hstack([corner, corner + size])
    formats = {
        "fractions of the picture's sides": (stored <= 1).all(axis=1),
        "corners (x1, y1, x2, y2)": _fits(stored, sides),
        "centres with width and height": _fits(np.hstack([corner - size / 2, corner + size / 2]), sides),
        "y before x": _fits(boxes[:, [1, 0, 3, 2]], sides),
    }
    told = _told(file, "boxes", entries, _faults(boxes, sides), formats)
    if outlines is not None:
        formats = {"fractions of the picture's sides": (outlines <= 1).all(axis=1)}
        told += _told(file, "outlines", entries, _faults(outlines, sides), formats)
        # Not refused: a box may also cover the hidden part of an object, and an outline be drawn roughly.
        slack = np.maximum(2 * _TOLERANCE, size / 2)
        is_outside = ((outlines[:, :2] < corner - slack) | (outlines[:, 2:] > corner + size + slack)).any(axis=1)
        told += _counted("outlines", entries, {"lie outside their box": is_outside})
    return [f"{file.parent.name}/{file.name}: {each}" for each in told]


def _faults(edges: Edges, sides: Edges) -> dict[str, Flags]:
    beyond = (edges[:, :2] < -_TOLERANCE) | (edges[:, 2:] > sides + _TOLERANCE)
    return {
        "reach beyond their picture": beyond.any(axis=1),
        "are less than a pixel wide or high": (edges[:, 2:] - edges[:, :2] < _LEAST_SIDE).any(axis=1),
    }


def _fits(edges: Edges, sides: Edges) -> Flags:
    return ~np.any([*_faults(edges, sides).values()], axis=0)


def _told(
    file: Path, what: str, entries: Entries, faults: Mapping[str, Flags], formats: Mapping[str, Flags]
) -> list[str]:
    told = _counted(what, entries, faults)
    likely = next((name for name, fits in formats.items() if fits.mean() >= _EXPLAINED), None)
    cause = f"; they look like {likely}" if likely is not None else ""
    if 2 * np.any([*faults.values()], axis=0).sum() > len(entries):
        rule = "pixels of the stored picture: left, top, width and height of a box, x and y of each point of an outline"
        raise DataError(f"{file}: {'; '.join(told)}{cause}. COCO's numbers are {rule}: convert them.")
    return [each + cause for each in told]


def _counted(what: str, entries: Entries, faults: Mapping[str, Flags]) -> list[str]:
    told = []
    for fault, has_fault in faults.items():
        if count := int(has_fault.sum()):
            first = int(has_fault.argmax())
            number = f" (id {entries[first]['id']!r:.40})" if "id" in entries[first] else ""
            told.append(f"{count:,} of {len(entries):,} {what} {fault}, first annotations[{first}]{number}")
    return told
