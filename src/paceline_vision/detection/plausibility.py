"""Plausibility of annotations: what is beyond its picture, too small, in another format, or twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError

Edges = NDArray[np.float64]
"""Left, top, right and bottom of each box or outline, [N, 4]."""
Entries = Sequence[Mapping[str, Any]]

_TOLERANCE, _LEAST_SIDE = 1.0, 0.99  # pixels, since coordinates may be rounded
_LEAST_SHARE = 0.3  # of a box and its outline's edges in the larger one; both may leave out hidden parts
_EXPLAINED = 0.95  # share of the boxes that another format must explain


def implausible(
    file: Path,
    entries: Entries,
    sides: Edges,
    outlines: Edges,
    *,
    masks: bool,
    place: Callable[[int], str],
    rule: str,
) -> list[str]:
    """Return a sentence for each kind of implausible annotation, with its count and the first one.

    Args:
        file: The annotation file, for messages.
        entries: Its valid annotations.
        sides: Width and height of each one's picture, [N, 2].
        outlines: Edges of each one's polygons; NaN without polygons.
        masks: Whether outlines are read as masks, not only compared with boxes.
        place: Returns where an annotation is, for messages.
        rule: What the format's numbers are, as a sentence.

    Raises:
        DataError: If most boxes or most outlines are implausible.
    """
    stored = np.array([each["bbox"] for each in entries], dtype=np.float64).reshape(-1, 4)
    corner, size = stored[:, :2], stored[:, 2:]
    others = {
        "corners (x1, y1, x2, y2)": stored,
        "centres with width and height": np.hstack([corner - size / 2, corner + size / 2]),
    }
    told = _told("boxes", np.hstack([corner, corner + size]), others, sides, place)
    told += _told("outlines", outlines, {}, sides, place) if masks else []
    is_apart = _are_apart(np.hstack([corner, corner + size]), outlines)
    for mask, fault in (
        (is_apart, "not around their outlines"),
        (_are_copies(stored, entries), "copies of another box"),
    ):
        told += [(_counted(mask, f"boxes are {fault}", place), False)] if mask.any() else []
    if refused := [sentence for sentence, is_most in told if is_most]:
        raise DataError(f"{file}: {'; '.join(refused)}. {rule}: convert or remove them.", path=file)
    return [f"{file.parent.name}/{file.name}: {sentence}" for sentence, _ in told]


def _told(
    what: str, edges: Edges, others: Mapping[str, Edges], sides: Edges, place: Callable[[int], str]
) -> list[tuple[str, bool]]:
    """Return a sentence for each kind of fault, and whether most annotations have a fault of any kind."""
    told = []
    faults = _faults(edges, sides)
    fits = {"fractions of the picture's sides": (edges <= 2).all(axis=1) & ~faults[2]}
    fits |= {name: ~_faults(each, sides).any(axis=0) for name, each in others.items()}
    likely = next((f"; they look like {name}" for name, fit in fits.items() if fit.sum() > _EXPLAINED * len(edges)), "")
    kinds = ("reach beyond their picture", "are below a pixel", "have no width or no height")
    for fault, has_fault in zip(kinds, faults, strict=True):
        if has_fault.any():
            sentence = _counted(has_fault, f"{what} {fault}", place) + likely
            told.append((sentence, 2 * int(faults.any(axis=0).sum()) > len(edges)))
    return told


def _counted(mask: NDArray[np.bool_], fault: str, place: Callable[[int], str]) -> str:
    return f"{int(mask.sum()):,} of {len(mask):,} {fault}, first {place(int(mask.argmax()))}"


def _are_apart(boxes: Edges, outlines: Edges) -> NDArray[np.bool_]:
    """Return which boxes are not around their outlines, as when one of the two is in another format."""
    shared = np.minimum(boxes, outlines)[:, 2:] - np.maximum(boxes, outlines)[:, :2]
    areas = [(each[:, 2:] - each[:, :2]).prod(axis=1) for each in (boxes, outlines)]
    are_apart: NDArray[np.bool_] = shared.clip(0).prod(axis=1) < _LEAST_SHARE * np.maximum(*areas)
    return are_apart  # false without an outline


def _are_copies(boxes: Edges, entries: Entries) -> NDArray[np.bool_]:
    """Return which annotations have the image, class and box of an earlier one."""
    # Sums that differ tell most boxes apart: sorting a million boxes, or a set of them, takes seconds.
    _, box, counts = np.unique(boxes @ [1, np.e, np.pi, np.sqrt(2)], return_inverse=True, return_counts=True)
    seen, are_copies = set[tuple[Any, ...]](), np.zeros(len(entries), dtype=bool)
    for at in np.flatnonzero(counts[box] > 1).tolist():
        key = (entries[at]["image_id"], entries[at]["category_id"], *boxes[at].tolist())
        are_copies[at] = key in seen
        seen.add(key)
    return are_copies


def _faults(edges: Edges, sides: Edges) -> Any:
    """Return which edges are beyond the picture, enclose less than a pixel, and enclose nothing, bool [3, N]."""
    beyond, size = (edges[:, :2] < -_TOLERANCE) | (edges[:, 2:] > sides + _TOLERANCE), edges[:, 2:] - edges[:, :2]
    is_empty = (size == 0).any(axis=1)
    return np.stack([beyond.any(axis=1), (size < _LEAST_SIDE).any(axis=1) & ~is_empty, is_empty])
