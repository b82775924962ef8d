"""Which samples are held out for evaluation, where a data set has no split of its own?

Always the same ones: the split depends on the labels and the fraction alone, not on the run's seed, so that
accuracies of different runs can be compared. Drawn by the samples' order, it may change where one is added; drawn by
hashes of their names, one that is added moves at most one other (docs/decisions/0029-data-sets.md).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Hashes = NDArray[np.uint64]

# Arbitrary, and fixed for good: another key is another split.
_KEY = 0x70616365
_HOLDOUT_KEY = 0x686F6C64


def stratified_split(labels: Ids, fraction: float, *, key: int = _KEY, hashes: Hashes | None = None) -> tuple[Ids, Ids]:
    """Split samples into (training ids, held-out ids), both sorted, holding out the same share of each class.

    Of a class with n samples, round(fraction · n) are held out: at least one where n ≥ 2, and never all of
    them. A fraction of 0 holds out none.

    Args:
        labels: Class index of every sample, int64 [N].
        fraction: Share to hold out, in [0, 1).
        key: Which of the splits of that size.
        hashes: A number for each sample, uint64 [N], of which the lowest of each class are held out, whatever the key
            and the order; None to draw by the order.
    """
    held_out = np.zeros(len(labels), dtype=bool)
    if fraction > 0 and len(labels):
        by_class = np.argsort(labels, kind="stable")
        classes, starts = np.unique(labels[by_class], return_index=True)
        for label, members in zip(classes, np.split(by_class, starts[1:]), strict=True):
            # Ranked by raw words: numpy promises the raw stream of Philox for ever, but not what shuffle makes of it.
            generator = np.random.Philox(key=np.array([key, int(label)], dtype=np.uint64))
            words = generator.random_raw(len(members)) if hashes is None else hashes[members]
            held_out[_lowest(members, words, fraction)] = True
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def hold_out(labels: Ids, fraction: float, hashes: Hashes | None = None) -> tuple[Ids, Ids]:
    """Split training samples into those to train on and those to choose by, drawn apart from the evaluation's."""
    return stratified_split(labels, fraction, key=_HOLDOUT_KEY, hashes=hashes)


def stratified_order(labels: Ids, hashes: Hashes) -> Ids:
    """Order samples so that the first so many of them hold the same share of each class, within one sample.

    One of each class comes first. The first 100 are among the first 200: what is taken is nested. (It is the method
    of Webster, by which seats of a parliament are given to parties.)

    Args:
        labels: Class index of every sample, int64 [N].
        hashes: A number for each, uint64 [N], by which those of one class follow one another.
    """
    by_class = np.lexsort((np.arange(len(labels)), hashes, labels))
    counts = np.bincount(labels, minlength=1)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    rank = np.arange(len(labels)) - starts
    # The middle of its sample's share of the class; all classes' first ones before anything else.
    place = np.where(rank == 0, -1.0, (rank + 0.5) / np.repeat(counts, counts))
    ordered: Ids = by_class[np.lexsort((hashes[by_class], place))]
    return ordered


def split_off(fraction: float) -> str:
    """Say where held-out images come from that :func:`stratified_split` has drawn."""
    if fraction == 0:
        return "none (data.validation_fraction=0)"
    return f"{100 * fraction:.4g}% of each class, always the same (data.validation_fraction)"


def _lowest(members: Ids, words: Hashes, fraction: float) -> Ids:
    """The members with the lowest words, as many as are to be held out of a class."""
    count = len(members)
    wanted = min(max(round(fraction * count), 1), count - 1)
    drawn: Ids = members[np.argsort(words, kind="stable")[:wanted]]
    return drawn
