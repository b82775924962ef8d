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

_TOLERANCE, _LEAST_SIDE = 1.0, 0.99  # pixels, since coordinates may be rounded
_EXPLAINED = 0.95  # share of the boxes that another format must explain
_RULE = "pixels of the stored picture: left, top, width and height of a box, x and y of each point of an outline"


def implausible(file: Path, entries: Entries, sides: Edges, outlines: Edges) -> list[str]:
    """Return a sentence for each kind of implausible annotation, with its count and the first one.

    Args:
        file: The annotation file, for messages.
        entries: Its valid annotations.
        sides: Width and height of each one's picture, [N, 2].
        outlines: Edges of each one's polygons; NaN without polygons.

    Raises:
        DataError: If most boxes or most outlines are implausible.
    """
    stored = np.array([each["bbox"] for each in entries], dtype=np.float64).reshape(-1, 4)
    corner, size = stored[:, :2], stored[:, 2:]
    others = {
        "corners (x1, y1, x2, y2)": stored,
        "centres with width and height": np.hstack([corner - size / 2, corner + size / 2]),
    }
    told = _told("boxes", np.hstack([corner, corner + size]), others, entries, sides)
    told += _told("outlines", outlines, {}, entries, sides)
    if refused := [sentence for sentence, is_most in told if is_most]:
        raise DataError(f"{file}: {'; '.join(refused)}. COCO's numbers are {_RULE}: convert them.")
    return [f"{file.parent.name}/{file.name}: {sentence}" for sentence, _ in told]


def _told(
    what: str, edges: Edges, others: Mapping[str, Edges], entries: Entries, sides: Edges
) -> list[tuple[str, bool]]:
    """Return a sentence for each kind of fault, and whether most annotations have a fault of any kind."""
    told = []
    faults = _faults(edges, sides)
    fits = {"fractions of the picture's sides": (edges <= 2).all(axis=1)}
    fits |= {name: ~_faults(each, sides).any(axis=0) for name, each in others.items()}
    likely = next(
        (f"; they look like {name}" for name, fit in fits.items() if fit.sum() > _EXPLAINED * len(entries)), ""
    )
    for fault, has_fault in zip(("reach beyond their picture", "are below a pixel"), faults, strict=True):
        if count := int(has_fault.sum()):
            first = int(has_fault.argmax())
            number = f" (id {entries[first]['id']!r:.40})" if "id" in entries[first] else ""
            sentence = f"{count:,} of {len(entries):,} {what} {fault}, first annotations[{first}]{number}{likely}"
            told.append((sentence, 2 * int(faults.any(axis=0).sum()) > len(entries)))
    return told


def _faults(edges: Edges, sides: Edges) -> Any:
    """Return which edges are beyond the picture, and which enclose less than a pixel, bool [2, N]."""
    beyond = (edges[:, :2] < -_TOLERANCE) | (edges[:, 2:] > sides + _TOLERANCE)
    return np.stack([beyond.any(axis=1), (edges[:, 2:] - edges[:, :2] < _LEAST_SIDE).any(axis=1)])
