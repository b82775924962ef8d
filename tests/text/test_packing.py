"""Each token stands in one row, no row is longer than the context, and hardly a place is empty."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_text.pipeline import packed_rows


@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=200),
    context=st.integers(1, 40),
    seed=st.integers(0, 2**63 - 1),
)
def test_each_token_once_and_no_row_too_long(lengths: list[int], context: int, seed: int) -> None:
    table = packed_rows(np.array(lengths), context, seed)
    pieces = [piece for row in range(len(table)) for piece in table.pieces(row)]
    found = [(document, token) for document, begin, end in pieces for token in range(begin, end)]
    # A single token left at a document's end asks for nothing, and is not there.
    kept = [max(0, length - (length % context == 1 % context)) for length in lengths]
    assert sorted(found) == [(document, token) for document, length in enumerate(kept) for token in range(length)]
    assert (table.tokens <= context).all()
    # Else a step of such rows would have a mean over nothing.
    assert (table.targets > 0).all()


@given(lengths=st.lists(st.integers(2, 40), min_size=1, max_size=120), seed=st.integers(0, 100))
def test_only_documents_that_are_too_long_are_cut(lengths: list[int], seed: int) -> None:
    table = packed_rows(np.array(lengths), 40, seed)
    assert sorted((table.ends - table.begins).tolist()) == sorted(lengths)


@given(lengths=st.lists(st.integers(2, 30), min_size=1, max_size=120))
def test_it_is_best_fit_decreasing(lengths: list[int]) -> None:
    """Piece by piece into the fullest row that has room: as many rows as from the histogram."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [(room, index) for index, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting)[1]] -= length
        else:
            rooms.append(30 - length)
    assert sorted(30 - packed_rows(np.array(lengths), 30, 0).tokens) == sorted(rooms)


@pytest.mark.parametrize("context", [128, 1024, 4096])
def test_long_tailed_lengths_fill_their_rows(context: int) -> None:
    drawn = np.random.default_rng(0).lognormal(np.log(context / 5), 1.0, 3000)
    assert packed_rows(np.maximum(1, drawn).astype(np.int64), context, 0).tokens.mean() > 0.98 * context


def test_the_same_seed_packs_the_same_and_another_otherwise() -> None:
    lengths = np.random.default_rng(1).integers(1, 60, 400)
    one, same, other = (packed_rows(lengths, 128, seed) for seed in (7, 7, 8))
    assert one.documents.tolist() == same.documents.tolist()
    assert one.documents.tolist() != other.documents.tolist()


def test_long_pieces_stand_first_no_more_often_than_last() -> None:
    table = packed_rows(np.random.default_rng(2).integers(1, 64, 6000), 128, 3)
    sizes, starts, ends = table.ends - table.begins, table.starts[:-1], table.starts[1:] - 1
    several = starts < ends
    first, last = sizes[starts[several]].mean(), sizes[ends[several]].mean()
    assert first == pytest.approx(last, rel=0.1)
    assert sizes[starts].mean() < 0.9 * np.maximum.reduceat(sizes, starts).mean()


def test_nothing_packs_into_nothing() -> None:
    for lengths in ([], [0, 0]):
        assert len(packed_rows(np.array(lengths, dtype=np.int64), 8, 0)) == 0
