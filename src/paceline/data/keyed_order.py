"""The order of a very large epoch: a keyed permutation that computes any slice in memory of the slice's size.

A generalised Feistel network (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002): a position is
written as a pair of digits with two nearly equal bases, and each round adds a keyed hash of one digit to the other,
modulo its base. That permutes all pairs. The pairs may be slightly more than the samples: a result beyond the last
sample is permuted again until it is one.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from paceline.data.random_draws import derive_seed
from paceline.data.slices import SampleIds

_ROUNDS = 8
_PURPOSE = 0x6C61726765  # "large": another stream than that of the sorted order
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27))
_LAST_SHIFT = np.uint64(31)
_HALF = np.uint64(32)

Words = NDArray[np.uint64]


class KeyedOrder:
    """An epoch's permutation of ``range(samples)``; a slice with step 1 is int64 [N].

    Args:
        seed: The run's seed, in [0, 2**64).
        epoch: The epoch, in [0, 2**64).
        samples: Samples in the epoch, in [1, 2**62).
        repeats: How often each sample is repeated in a row (see ``epoch_order``).
    """

    def __init__(self, seed: int, epoch: int, samples: int, repeats: int = 1) -> None:
        self._samples, self._repeats = samples, repeats
        self._different = samples // repeats
        high = math.isqrt(self._different - 1) + 1
        self._bases = np.uint64(high), np.uint64(-(-self._different // high))
        self._keys = np.random.Philox(key=[derive_seed(seed, _PURPOSE), epoch]).random_raw(_ROUNDS)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, places: slice) -> SampleIds:
        begin, end, _ = places.indices(self._samples)
        position, copy = np.divmod(np.arange(begin, end), self._repeats)
        found = self._permuted(position.astype(np.uint64))
        while (beyond := np.flatnonzero(found >= self._different)).size:
            found[beyond] = self._permuted(found[beyond])
        ids: SampleIds = found.astype(np.int64) + self._different * copy
        return ids

    def _permuted(self, numbers: Words) -> Words:
        digits = [*np.divmod(numbers, self._bases[1])]
        for index, key in enumerate(self._keys):
            changed = index % 2
            base = self._bases[changed]
            total = digits[changed] + (_hashed(digits[1 - changed] + key) * base >> _HALF)
            digits[changed] = np.minimum(total, total - base)  # modulo: below the base, the difference wraps around
        result: Words = digits[0] * self._bases[1] + digits[1]
        return result


def _hashed(words: Words) -> Words:
    """Hash words in place to 32 bits: the upper half of SplitMix64's finaliser (Steele, Lea and Flood 2014)."""
    for factor, shift in zip(_FACTORS, _SHIFTS, strict=True):
        words ^= words >> shift
        words *= factor
    words ^= words >> _LAST_SHIFT
    words >>= _HALF
    return words
