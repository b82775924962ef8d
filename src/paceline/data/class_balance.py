"""Classes of unequal size: what their samples count for in the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from paceline.errors import RecipeError, did_you_mean

SampleClasses = NDArray[np.int64]
"""The class of each training sample, [samples]."""
_NAMED = 6


def weights_by_class(
    key: str, asked: Literal["balanced"] | Mapping[str, float], labels: SampleClasses, names: Sequence[str]
) -> tuple[float, ...]:
    """Return the weight of each class.

    ``balanced`` is n / (classes * n_c), as in scikit-learn: each class then counts for the same in all. A class without
    samples has weight 1, and so has one that a mapping does not name.

    Args:
        key: Where it was asked for, for the message.
        asked: What the recipe says.
        labels: The class of each training sample.
        names: The classes' names.

    Raises:
        RecipeError: If the mapping names an unknown class.
    """
    if asked == "balanced":
        counts = np.bincount(labels, minlength=len(names))
        even = len(labels) / np.count_nonzero(counts)
        return tuple(np.where(counts > 0, even / np.maximum(counts, 1), 1.0).tolist())
    for name in asked:
        if name not in names:
            known = ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")
            hint = did_you_mean(name, names)
            raise RecipeError(f"{key} names {name!r}, but the data has the {len(names)} classes {known}.{hint}")
    return tuple(float(asked.get(name, 1.0)) for name in names)


def in_words(weights: Sequence[float], labels: SampleClasses, names: Sequence[str]) -> str:
    """Return the smallest and the largest weight of the classes that have samples, for people."""
    counts = np.bincount(labels, minlength=len(names))
    present = np.flatnonzero(counts).tolist()
    ends = (choose(present, key=lambda each: weights[each]) for choose in (min, max))
    return " to ".join(f"{weights[each]:.3g} for {names[each]!r} ({counts[each]:,} samples)" for each in ends)
