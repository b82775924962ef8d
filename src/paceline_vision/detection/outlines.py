"""Outlines of objects: polygons, and run lengths as lists or COCO's compressed strings."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_OFFSET, _CONTINUES, _NEGATIVE = 48, 32, 16  # to characters of a compressed string, which hold 5 bits each
_LONGEST_NUMBER = 7  # characters, 35 bits: more than the number of pixels of any accepted picture


def outline_fault(outline: Any, height: int, width: int) -> str | None:
    """Explain why a segmentation cannot be drawn in a picture of this size; None if it can.

    Args:
        outline: The segmentation, without NaN, with which comparisons would be meaningless.
        height: The picture's height.
        width: The picture's width.
    """
    if isinstance(outline, dict):
        return _rle_fault(outline, height, width)
    if not isinstance(outline, list) or not outline:
        return "it must be a list of polygons, or run lengths (a mapping of counts and size)"
    return next((fault for each in outline if (fault := _polygon_fault(each, height, width))), None)


def mask_of(outline: Any, height: int, width: int) -> NDArray[np.uint8]:
    """Draw a valid segmentation, uint8 [H, W] of 0 and 1."""
    if isinstance(outline, dict):
        counts = _counts(outline["counts"])
        assert counts is not None
        pixels = np.repeat((np.arange(len(counts)) % 2).astype(np.uint8), counts)
        return pixels.reshape(width, height).T  # runs are in column order
    from pycocotools import mask

    polygons: NDArray[np.uint8] = mask.decode(mask.merge(mask.frPyObjects(outline, height, width)))
    return polygons


def has_pixels(outline: Any, height: int, width: int) -> bool:
    """Whether a valid segmentation covers any pixel."""
    if isinstance(outline, dict):
        counts = _counts(outline["counts"])
        return counts is not None and any(counts[1::2])
    from pycocotools import mask

    return bool(mask.area(mask.frPyObjects(outline, height, width)).any())


def edges(outline: Any) -> list[float]:
    """Return left, top, right and bottom edge of a segmentation's polygons."""
    numbers = [[number for polygon in outline for number in polygon[axis::2]] for axis in (0, 1)]
    return [pick(each) for pick in (min, max) for each in numbers]


def _polygon_fault(polygon: Any, height: int, width: int) -> str | None:
    if not isinstance(polygon, list) or not set(map(type, polygon)) <= {int, float}:
        return "a polygon must be a list of numbers"
    if len(polygon) < 6 or len(polygon) % 2:
        return f"a polygon has {len(polygon)} numbers; it must have x and y of at least three points"
    # A corner may lie outside the picture; a distant one would make the library allocate memory for the whole edge.
    far = max(height, width)
    if min(polygon) < -far or max(polygon) > 2 * far:
        return "a polygon has coordinates far outside the picture"
    return None


def _rle_fault(runs: dict[str, Any], height: int, width: int) -> str | None:
    if runs.get("size") != [height, width]:
        return f"its run lengths have the size {runs.get('size')}, but the picture has {[height, width]}"
    counts = _counts(runs.get("counts"))
    if counts is None:
        return "its counts are neither a list of non-negative numbers nor a compressed string"
    filled = int(counts.sum())
    if filled != height * width:
        return f"its run lengths fill {filled:,} pixels, but the picture has {height * width:,}"
    return None


def _counts(counts: Any) -> NDArray[np.int64] | None:
    """Return run lengths as numbers; None if they are malformed."""
    if isinstance(counts, str):
        return _decompressed(counts)
    if not isinstance(counts, list) or not set(map(type, counts)) <= {int}:
        return None
    return np.array(counts, dtype=np.int64) if all(0 <= each < 2**35 for each in counts) else None


def _decompressed(text: str) -> NDArray[np.int64] | None:
    """Decode the string form, in which each number from the fourth on is relative to the number two before it."""
    codes = np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8).astype(np.int64) - _OFFSET
    if not len(codes) or codes.min() < 0 or codes.max() >= 2 * _CONTINUES or codes[-1] & _CONTINUES:
        return None
    lasts = np.flatnonzero(codes & _CONTINUES == 0)
    firsts = np.concatenate([[0], lasts[:-1] + 1])
    lengths = lasts - firsts + 1
    if lengths.max() > _LONGEST_NUMBER:
        return None
    shifts = 5 * (np.arange(len(codes)) - np.repeat(firsts, lengths))
    counts = np.add.reduceat((codes & (_CONTINUES - 1)) << shifts, firsts)
    counts -= np.where(codes[lasts] & _NEGATIVE, 1 << 5 * lengths, 0)
    counts[1::2] = counts[1::2].cumsum()
    counts[2::2] = counts[2::2].cumsum()
    return counts if counts.min() >= 0 else None
