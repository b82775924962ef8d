"""Check and draw the masks of COCO's annotations: polygons, and run lengths as lists or compressed strings."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_OFFSET, _CONTINUES, _NEGATIVE = 48, 32, 16  # of a character in a compressed string, which holds 5 bits of a number
_LONGEST_NUMBER = 7  # characters, 35 bits: more than the pixels of any picture that is decoded


def outline_fault(outline: Any, height: int, width: int) -> str | None:
    """Say why a segmentation cannot be drawn in a picture of this size; None if it can.

    Args:
        outline: The segmentation, which holds no NaN: a comparison with one decides nothing.
        height: The picture's height.
        width: The picture's width.
    """
    if isinstance(outline, dict):
        return _runs_fault(outline, height, width)
    if not isinstance(outline, list) or not outline:
        return "it must be a list of polygons, or run lengths (a mapping of counts and size)"
    return next((fault for each in outline if (fault := _polygon_fault(each, height, width))), None)


def mask_of(outline: Any, height: int, width: int) -> NDArray[np.uint8]:
    """Draw a segmentation that has no fault, uint8 [H, W] of 0 and 1."""
    if isinstance(outline, dict):
        counts = _counts(outline["counts"])
        assert counts is not None
        drawn = np.repeat((np.arange(len(counts)) % 2).astype(np.uint8), counts)
        return drawn.reshape(width, height).T  # runs go down the columns
    from pycocotools import mask

    polygons: NDArray[np.uint8] = mask.decode(mask.merge(mask.frPyObjects(outline, height, width)))
    return polygons


def _polygon_fault(polygon: Any, height: int, width: int) -> str | None:
    if not isinstance(polygon, list) or not set(map(type, polygon)) <= {int, float}:
        return "a polygon must be a list of numbers"
    if len(polygon) < 6 or len(polygon) % 2:
        return f"a polygon has {len(polygon)} numbers; it must have x and y of at least three points"
    # A corner may lie outside the picture; for one far outside, the library would need memory for the way there.
    far = max(height, width)
    if min(polygon) < -far or max(polygon) > 2 * far:
        return "a polygon has coordinates far outside the picture"
    return None


def _runs_fault(runs: dict[str, Any], height: int, width: int) -> str | None:
    if runs.get("size") != [height, width]:
        return f"its run lengths have the size {runs.get('size')}, but the picture has {[height, width]}"
    counts = _counts(runs.get("counts"))
    if counts is None:
        return "its counts are neither a list of numbers from 0 on nor a compressed string"
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
    """Read the string form, in which each number from the fourth on is the difference from the one two before it."""
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
