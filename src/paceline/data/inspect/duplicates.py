"""Which samples are the same file, and which only look the same?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from paceline.data.image.source import Ids

Hashes = NDArray[np.uint64]

# Two hashes that differ in at most 5 of 64 bits agree in at least one of 6 groups of bits.
MOST_BITS = 5
_BANDS = ((0, 11), (11, 11), (22, 11), (33, 11), (44, 10), (54, 10))
_MOST_IN_BAND = 4096  # of images that agree in a band; beyond, a set has so many alike that any of them tells
_AT_ONCE = 1 << 20  # pairs held in memory
_SET_BITS = np.array([number.bit_count() for number in range(1 << 16)], dtype=np.uint8)


def first_of(content: Hashes, present: NDArray[np.bool_]) -> Ids:
    """For each sample the first one with the same content, itself if there is none before it; int64 [N].

    Args:
        content: 128-bit digests as pairs of words, [N, 2].
        present: Which samples have one.
    """
    first = np.arange(len(content), dtype=np.int64)
    numbers = np.flatnonzero(present)
    if len(numbers) == 0:
        return first
    order = numbers[np.lexsort((numbers, content[numbers, 1], content[numbers, 0]))]
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = (content[order[1:]] != content[order[:-1]]).any(axis=1)
    first[order] = order[np.flatnonzero(begins)[np.cumsum(begins) - 1]]
    return first


def look_alikes(hashes: Hashes, split_of: NDArray[np.int8], first: Ids) -> Ids:
    """Pairs (sample, the one in an earlier split that looks most like it), int64 [pairs, 2].

    What is the same file is left out, and so are samples whose hash is 0.
    """
    nearest = np.full(len(hashes), MOST_BITS + 1, dtype=np.uint8)
    other = np.full(len(hashes), -1, dtype=np.int64)
    seen = np.flatnonzero(hashes)
    for split in np.unique(split_of[seen])[1:]:
        asked, known = seen[split_of[seen] == split], seen[split_of[seen] < split]
        for one, two in _candidates(hashes, asked, known):
            apart = first[one] != first[two]
            _keep_nearest(hashes, one[apart], two[apart], nearest, other)
    found = np.flatnonzero(other >= 0)
    return np.stack([found, other[found]], axis=1)


def _candidates(hashes: Hashes, asked: Ids, known: Ids) -> Iterator[tuple[Ids, Ids]]:
    """Pairs that agree in a band, some millions at a time."""
    for shift, width in _BANDS:
        band = (hashes >> np.uint64(shift)) & np.uint64((1 << width) - 1)
        order = known[np.argsort(band[known], kind="stable")]
        begins = np.searchsorted(band[order], band[asked], side="left")
        ends = np.searchsorted(band[order], band[asked], side="right")
        counts = np.minimum(ends - begins, _MOST_IN_BAND)
        totals = np.cumsum(counts)
        start = 0
        while start < len(asked):
            before = totals[start - 1] if start else 0
            stop = max(int(np.searchsorted(totals, before + _AT_ONCE, side="right")), start + 1)
            part = counts[start:stop]
            within = np.arange(part.sum()) - np.repeat(np.cumsum(part) - part, part)
            yield np.repeat(asked[start:stop], part), order[np.repeat(begins[start:stop], part) + within]
            start = stop


def _keep_nearest(hashes: Hashes, one: Ids, two: Ids, nearest: NDArray[np.uint8], other: Ids) -> None:
    different = (hashes[one] ^ hashes[two]).view(np.uint16).reshape(-1, 4)
    bits = _SET_BITS[different].sum(axis=1, dtype=np.uint8)
    close = bits < nearest[one]
    one, two, bits = one[close], two[close], bits[close]
    order = np.lexsort((two, bits, one))
    samples, places = np.unique(one[order], return_index=True)
    nearest[samples], other[samples] = bits[order][places], two[order][places]
