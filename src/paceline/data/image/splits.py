"""Which samples are held out for evaluation, where a data set has no split of its own?

Always the same ones: the split depends on the labels and the fraction alone, not on the run's seed, so that
accuracies of different runs can be compared. Adding a sample may change the split.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

# Arbitrary, and fixed for good: another key is another split.
_KEY = 0x70616365
_HOLDOUT_KEY = 0x686F6C64


def stratified_split(labels: Ids, fraction: float, *, key: int = _KEY) -> tuple[Ids, Ids]:
    """Split samples into (training ids, held-out ids), both sorted, holding out the same share of each class.

    Of a class with n samples, round(fraction · n) are held out: at least one where n ≥ 2, and never all of
    them. A fraction of 0 holds out none.

    Args:
        labels: Class index of every sample, int64 [N].
        fraction: Share to hold out, in [0, 1).
        key: Which of the splits of that size.
    """
    held_out = np.zeros(len(labels), dtype=bool)
    if fraction > 0 and len(labels):
        by_class = np.argsort(labels, kind="stable")
        classes, starts = np.unique(labels[by_class], return_index=True)
        for label, members in zip(classes, np.split(by_class, starts[1:]), strict=True):
            held_out[_drawn(members, int(label), fraction, key)] = True
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def hold_out(labels: Ids, fraction: float) -> tuple[Ids, Ids]:
    """Split training samples into those to train on and those to choose by, drawn apart from the evaluation's."""
    return stratified_split(labels, fraction, key=_HOLDOUT_KEY)


def split_off(fraction: float) -> str:
    """Say where held-out images come from that :func:`stratified_split` has drawn."""
    if fraction == 0:
        return "none (data.validation_fraction=0)"
    return f"{100 * fraction:.4g}% of each class, always the same (data.validation_fraction)"


def _drawn(members: Ids, label: int, fraction: float, key: int) -> Ids:
    count = len(members)
    wanted = min(max(round(fraction * count), 1), count - 1)
    # Ranked by raw words: numpy promises the raw stream of Philox for ever, but not what shuffle makes of it.
    words = np.random.Philox(key=np.array([key, label], dtype=np.uint64)).random_raw(count)
    drawn: Ids = members[np.argsort(words, kind="stable")[:wanted]]
    return drawn
