"""Random numbers of a sample: a pure function of (seed, epoch, sample id), for any subset in any order.

Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
(SC 2011), vectorised over samples. A counter-based generator has no state to save, to seed per worker, or to
advance past skipped samples.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10

Words = NDArray[np.uint64]


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Encrypt counters with a key; each word holds 32 bits in a uint64 array. Arrays broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ c1 ^ np.uint64(k0),
            product1 & _LOW,
            (product0 >> _SHIFT) ^ c3 ^ np.uint64(k1),
            product0 & _LOW,
        )
        k0 = (k0 + _WEYL[0]) & 0xFFFFFFFF
        k1 = (k1 + _WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def uniforms(seed: int, epoch: int, ids: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """Draw ``count`` numbers in [0, 1) for each sample, float64 [len(ids), count], with 32 random bits each.

    Args:
        seed: The run's seed, in [0, 2**64).
        epoch: Epoch number, in [0, 2**32).
        ids: Sample ids, in [0, 2**63).
        count: Numbers per sample; a longer row starts with the numbers of a shorter one.
    """
    blocks = -(-count // 4)
    sample = ids.astype(np.uint64)[:, None]
    shape = (len(ids), blocks)
    counter = (
        np.broadcast_to(sample & _LOW, shape),
        np.broadcast_to(sample >> _SHIFT, shape),
        np.full(shape, epoch, dtype=np.uint64),
        np.broadcast_to(np.arange(blocks, dtype=np.uint64), shape),
    )
    words = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))
    drawn = np.stack(words, axis=-1).reshape(len(ids), blocks * 4)[:, :count]
    return np.multiply(drawn, 2.0**-32, dtype=np.float64)


def derive_seed(*parts: int) -> int:
    """Mix integers into one 63-bit generator seed, e.g. ``derive_seed(seed, step, logical_rank)`` for dropout.

    SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014), chained over the parts.
    """
    mask = 0xFFFFFFFFFFFFFFFF
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state >> 1
