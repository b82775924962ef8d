"""Hidden tokens: as many as the length says, at places that only (seed, epoch, sample) decides."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline_text.corpus import IGNORED_TARGET
from paceline_text.pipeline import Masking, masked_count

MASKING = Masking(seed=3, fraction=0.15, mask=257, vocabulary=259, context=64)
TOKENS = np.arange(64, dtype=np.int64)


@pytest.mark.parametrize(("tokens", "count"), [(1, 1), (3, 1), (10, 2), (64, 10), (256, 38)])
def test_the_number_follows_from_the_length(tokens: int, count: int) -> None:
    assert masked_count(np.array([tokens]), 0.15).tolist() == [count]


def test_what_is_asked_for_is_what_stood_there() -> None:
    for sample in range(20):
        seen, asked = MASKING(TOKENS, epoch=1, sample=sample)
        places = asked != IGNORED_TARGET
        assert places.sum() == 10
        assert (asked[places] == TOKENS[places]).all()
        assert (seen[~places] == TOKENS[~places]).all()


def test_four_fifths_are_hidden_a_tenth_replaced_and_a_tenth_left() -> None:
    hidden = left = replaced = 0
    for sample in range(1000):
        seen, asked = MASKING(TOKENS, epoch=0, sample=sample)
        places = asked != IGNORED_TARGET
        hidden += (seen[places] == 257).sum()
        left += (seen[places] == asked[places]).sum()
        replaced += ((seen[places] != 257) & (seen[places] != asked[places])).sum()
    assert hidden / 10_000 == pytest.approx(0.8, abs=0.015)
    assert left / 10_000 == pytest.approx(0.1, abs=0.015)
    assert replaced / 10_000 == pytest.approx(0.1, abs=0.015)


def test_places_are_keyed_by_seed_epoch_and_sample() -> None:
    def places(masking: Masking, epoch: int, sample: int) -> list[int]:
        return np.flatnonzero(masking(TOKENS, epoch=epoch, sample=sample)[1] != IGNORED_TARGET).tolist()

    known = places(MASKING, 1, 5)
    assert known == places(MASKING, 1, 5)
    assert all(known != other for other in (places(MASKING, 2, 5), places(MASKING, 1, 6)))
    assert known != places(replace(MASKING, seed=4), 1, 5)
