"""The pieces of documents that make one sample.

A sample of a language model is a row of tokens. A row table says of each row what it holds, so that its size is known
before a token is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from paceline.data.text.corpus import TokenCorpus
from paceline.data.text.tokenizer import TokenIds

Whole = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowTable:
    """What each row holds: pieces of documents, in order.

    Attributes:
        documents: The document of each piece, int64 [pieces].
        begins: Its first token, int64 [pieces].
        ends: The token after its last, int64 [pieces].
        starts: Each row's first piece, and where the last row's end; int64 [rows + 1].
        tokens: Tokens in each row, int64 [rows].
        targets: Tokens of each row that have one after them, which can be asked for; int64 [rows].
        context: Most tokens that a row may hold.
        separate: Whether the documents in a row know nothing of one another; else they are one stream, in which what
            follows a row's last token is the next row's first.
    """

    documents: Whole
    begins: Whole
    ends: Whole
    starts: Whole
    tokens: Whole
    targets: Whole
    context: int
    separate: bool

    @classmethod
    def of_separate(
        cls, documents: Whole, begins: Whole, ends: Whole, starts: Whole, *, lengths: Whole, context: int
    ) -> Self:
        """A table of rows whose documents know nothing of one another.

        Args:
            documents: The document of each piece.
            begins: Its first token.
            ends: The token after its last.
            starts: Each row's first piece, and the number of pieces.
            lengths: Tokens of each document, int64 [documents].
            context: Most tokens that a row may hold.
        """
        sizes = ends - begins
        asked = sizes - (ends == lengths[documents])  # a document's last token has none after it
        return cls(
            documents=documents,
            begins=begins,
            ends=ends,
            starts=starts,
            tokens=_summed(sizes, starts),
            targets=_summed(asked, starts),
            context=context,
            separate=True,
        )

    def __len__(self) -> int:
        return len(self.starts) - 1

    def pieces(self, row: int) -> list[tuple[int, int, int]]:
        """A row's pieces: document, first token, and the token after the last."""
        part = slice(self.starts[row], self.starts[row + 1])
        return list(
            zip(self.documents[part].tolist(), self.begins[part].tolist(), self.ends[part].tolist(), strict=True)
        )

    def next_piece(self, row: int) -> tuple[int, int] | None:
        """Where the stream goes on after a row: document and token; None at its end."""
        index = self.starts[row + 1]
        return None if index == len(self.documents) else (int(self.documents[index]), int(self.begins[index]))


def chunked_rows(lengths: Whole, context: int) -> RowTable:
    """Documents one after the other in one stream, cut every ``context`` tokens; a single token at its end is left out.

    Args:
        lengths: Tokens of each document, int64 [documents].
        context: Tokens in a row.
    """
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total = int(offsets[-1])
    rows = max(0, -(-(total - 1) // context))
    # A piece begins where a document or a row does.
    cuts = np.unique(np.concatenate([offsets, np.arange(0, total, context, dtype=np.int64)]))
    first, after = cuts[:-1], cuts[1:]
    documents = np.searchsorted(offsets, first, side="right") - 1
    starts = np.searchsorted(first, np.arange(rows + 1, dtype=np.int64) * context)
    bounds = np.minimum(np.arange(rows + 1, dtype=np.int64) * context, total)
    tokens = np.diff(bounds)
    return RowTable(
        documents=documents,
        begins=first - offsets[documents],
        ends=after - offsets[documents],
        starts=starts,
        tokens=tokens,
        targets=tokens - (bounds[1:] == total),
        context=context,
        separate=False,
    )


def single_rows(lengths: Whole, context: int) -> RowTable:
    """One document per row, or a part of one that is longer; a single token at a document's end is left out.

    Args:
        lengths: Tokens of each document, int64 [documents].
        context: Most tokens in a row.
    """
    parts = np.maximum(0, -(-(lengths - 1) // context))
    documents = np.repeat(np.arange(len(lengths), dtype=np.int64), parts)
    number = np.arange(len(documents), dtype=np.int64) - np.repeat(np.cumsum(parts) - parts, parts)
    begins = number * context
    ends = np.minimum(begins + context, lengths[documents])
    starts = np.arange(len(documents) + 1, dtype=np.int64)
    return RowTable.of_separate(documents, begins, ends, starts, lengths=lengths, context=context)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row, read.

    Attributes:
        tokens: Ids, int64 [T].
        following: The id after each, -100 where there is none; int64 [T].
        positions: Place of each in its document's piece, or in the row where documents are one stream; int64 [T].
        documents: Number of its document within the row, int64 [T]; 0 where documents are one stream.
    """

    tokens: TokenIds
    following: TokenIds
    positions: Whole
    documents: Whole


NOTHING = -100
"""A target that is not asked for, as torch's cross-entropy knows it."""


def read_row(corpus: TokenCorpus, table: RowTable, row: int) -> Row:
    """Read a row's tokens and what follows each."""
    pieces = table.pieces(row)
    if table.separate:
        stops = [min(end + 1, int(corpus.lengths[document])) for document, _, end in pieces]
        read = [corpus.read(document, begin, stop) for (document, begin, _), stop in zip(pieces, stops, strict=True)]
        sizes = [end - begin for _, begin, end in pieces]
        after = [np.append(ids[1:], [NOTHING] * (1 + n - len(ids))) for ids, n in zip(read, sizes, strict=True)]
        return Row(
            tokens=np.concatenate([ids[:n] for ids, n in zip(read, sizes, strict=True)]),
            following=np.concatenate(after).astype(np.int64),
            positions=np.concatenate([np.arange(n, dtype=np.int64) for n in sizes]),
            documents=np.repeat(np.arange(len(sizes), dtype=np.int64), sizes),
        )
    parts, following = [corpus.read(*piece) for piece in pieces], table.next_piece(row)
    at_end = np.array([NOTHING])
    parts.append(at_end if following is None else corpus.read(following[0], following[1], following[1] + 1))
    stream = np.concatenate(parts)
    size = len(stream) - 1
    return Row(
        tokens=stream[:-1],
        following=stream[1:],
        positions=np.arange(size, dtype=np.int64),
        documents=np.zeros(size, dtype=np.int64),
    )


def _summed(values: Whole, starts: Whole) -> Whole:
    """Sums of consecutive values, from each start to the next."""
    before = np.concatenate([[0], np.cumsum(values)])
    return np.diff(before[starts])
