"""The generator is the published one, and a sample's numbers depend on nothing but (seed, epoch, id)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.random_draws import derive_seed, philox4x32, uniforms

SEEDS = st.integers(0, 2**64 - 1)
EPOCHS = st.integers(0, 2**32 - 1)
IDS = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=20)


def word(value: int) -> np.ndarray:
    return np.array([value], dtype=np.uint64)


# Random123's kat_vectors for philox4x32-10: counter, key, answer.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_published_vectors(counter: tuple[int, ...], key: tuple[int, int], answer: tuple[int, ...]) -> None:
    words = philox4x32(tuple(word(value) for value in counter), key)  # type: ignore[arg-type]
    assert tuple(int(each[0]) for each in words) == answer


def test_vectors_together_are_the_vectors_apart() -> None:
    counters = np.random.default_rng(0).integers(0, 2**32, (4, 50), dtype=np.uint64)
    together = philox4x32(tuple(counters), (7, 9))  # type: ignore[arg-type]
    for column in range(50):
        apart = philox4x32(tuple(counters[:, column : column + 1]), (7, 9))  # type: ignore[arg-type]
        assert [int(each[column]) for each in together] == [int(each[0]) for each in apart]


def test_numbers_are_the_cipher_of_id_and_epoch() -> None:
    seed, epoch, sample = (0x299F31D0 << 32) | 0xA4093822, 0x13198A2E, (0x0A300 << 32) | 0x243F6A88
    drawn = uniforms(seed, epoch, np.array([sample]), 8)[0]
    for block in range(2):
        counter = (word(sample & 0xFFFFFFFF), word(sample >> 32), word(epoch), word(block))
        expected = [int(each[0]) / 2**32 for each in philox4x32(counter, (0xA4093822, 0x299F31D0))]
        assert drawn[4 * block : 4 * block + 4].tolist() == expected


@given(SEEDS, EPOCHS, IDS, st.integers(0, 50), st.randoms(use_true_random=False))
def test_any_subset_in_any_order_has_the_same_numbers(
    seed: int, epoch: int, ids: list[int], count: int, random: object
) -> None:
    whole = uniforms(seed, epoch, np.array(ids), count)
    assert whole.shape == (len(ids), count)
    assert whole.dtype == np.float64
    assert ((whole >= 0) & (whole < 1)).all()
    picked = [random.randrange(len(ids)) for _ in range(5)]  # type: ignore[attr-defined]
    assert (uniforms(seed, epoch, np.array(ids)[picked], count) == whole[picked]).all()


@given(SEEDS, EPOCHS, IDS, st.integers(1, 30), st.integers(1, 30))
def test_a_longer_row_begins_with_the_shorter(seed: int, epoch: int, ids: list[int], short: int, more: int) -> None:
    numbers = np.array(ids)
    assert (uniforms(seed, epoch, numbers, short + more)[:, :short] == uniforms(seed, epoch, numbers, short)).all()


def test_no_samples_no_numbers() -> None:
    assert uniforms(1, 2, np.empty(0, dtype=np.int64), 3).shape == (0, 3)


def test_seed_epoch_and_id_all_matter() -> None:
    ids = np.arange(1000)
    drawn = [uniforms(seed, epoch, ids, 4) for seed in (0, 1, 2**32, 2**63) for epoch in (0, 1)]
    drawn.append(uniforms(0, 0, ids + 2**32, 4))
    for first in range(len(drawn)):
        for second in range(first):
            assert not (drawn[first] == drawn[second]).any(axis=1).any()


def test_they_are_uniform() -> None:
    drawn = uniforms(3, 5, np.arange(100_000), 4)
    assert np.abs(drawn.mean(axis=0) - 0.5).max() < 0.005
    assert np.abs(drawn.var(axis=0) - 1 / 12).max() < 0.001
    correlations = np.corrcoef(np.hstack([drawn[:-1], drawn[1:]]).T) - np.eye(8)
    assert np.abs(correlations).max() < 0.02


def test_dropout_seeds_differ() -> None:
    seeds = {derive_seed(seed, step, rank) for seed in range(10) for step in range(50) for rank in range(20)}
    assert len(seeds) == 10 * 50 * 20
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, 2) != derive_seed(2, 1)
    assert derive_seed(0) != derive_seed(0, 0)


def test_dropout_seeds_are_fixed_for_good() -> None:
    """A change of these would change every run with dropout that is resumed by a later version."""
    assert derive_seed(0, 0, 0) == 4635879678023765015
    assert derive_seed(1, 2, 3) == 7602938901349714354
    assert derive_seed(2**63 - 1, 10**6, 63) == 2992138418357068992


def test_seeds_of_many_ids_are_those_of_each() -> None:
    ids: Any = np.array([0, 1, 2**31, 2**62 + 1], dtype=np.uint64)
    for parts in ((), (2**63 - 1, 5), (0x747261696E, 3, 2)):
        seeds: Any = derive_seed(*parts, ids)
        assert seeds.tolist() == [derive_seed(*parts, each) for each in ids.tolist()]
