"""Rows hold every token that can be asked for exactly once, and know what they hold before it is read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_text.corpus import IGNORED_TARGET, StoredCorpus
from paceline_text.pipeline import RowTable, chunked_rows, read_row, single_rows

LENGTHS = st.lists(st.integers(0, 9), min_size=0, max_size=8)


def corpus_of(lengths: list[int]) -> StoredCorpus:
    """Documents whose tokens are all different, so that each is known by its number."""
    sizes = np.array(lengths, dtype=np.int64)
    return StoredCorpus(np.arange(sizes.sum(), dtype=np.uint16), sizes, [f"d{i}" for i in range(len(lengths))])


def pairs(corpus: StoredCorpus, table: RowTable) -> list[tuple[int, int]]:
    """Every token with what is asked after it, over all rows; what the table says of each row is checked."""
    found = []
    for row in range(len(table)):
        read = read_row(corpus, table, row)
        asked = read.following != IGNORED_TARGET
        assert (len(read.tokens), asked.sum()) == (table.tokens[row], table.targets[row])
        assert 1 <= len(read.tokens) <= table.context
        assert len(read.positions) == len(read.documents) == len(read.following) == len(read.tokens)
        assert table.targets[row] > 0
        found += list(zip(read.tokens[asked].tolist(), read.following[asked].tolist(), strict=True))
    return found


@given(LENGTHS, st.integers(2, 7))
def test_chunks_ask_for_each_token_of_the_stream_after_its_first(lengths: list[int], context: int) -> None:
    corpus = corpus_of(lengths)
    total = sum(lengths)
    assert pairs(corpus, chunked_rows(corpus.lengths, context)) == [(at, at + 1) for at in range(total - 1)]


@given(LENGTHS, st.integers(2, 7))
def test_single_documents_ask_for_each_token_after_its_document_s_first(lengths: list[int], context: int) -> None:
    corpus = corpus_of(lengths)
    table = single_rows(corpus.lengths, context)
    ends = set(np.cumsum(lengths).tolist())
    assert pairs(corpus, table) == [(at, at + 1) for at in range(sum(lengths)) if at + 1 not in ends]


def test_documents_of_a_separate_row_begin_anew() -> None:
    corpus = corpus_of([3, 4, 2])
    columns = {"documents": [0, 2, 1], "begins": [0, 0, 1], "ends": [3, 2, 3], "starts": [0, 2, 3]}
    table = RowTable(**{name: np.array(each) for name, each in columns.items()}, lengths=corpus.lengths, context=8)
    first, second = read_row(corpus, table, 0), read_row(corpus, table, 1)
    assert first.tokens.tolist() == [0, 1, 2, 7, 8]
    assert first.following.tolist() == [1, 2, IGNORED_TARGET, 8, IGNORED_TARGET]
    assert first.positions.tolist() == [0, 1, 2, 0, 1]
    assert first.documents.tolist() == [0, 0, 0, 1, 1]
    assert (second.tokens.tolist(), second.following.tolist()) == ([4, 5], [5, 6])  # cut: its document goes on
    assert (table.tokens.tolist(), table.targets.tolist()) == ([5, 2], [3, 2])


@pytest.mark.parametrize("rows", [chunked_rows, single_rows])
def test_a_document_of_one_token_asks_for_nothing(rows: object) -> None:
    assert len(rows(np.array([1]), 4)) == 0  # type: ignore[operator]
