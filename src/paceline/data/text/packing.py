"""Into which rows of a fixed number of tokens do whole documents go, so that hardly a place stays empty?

Best-fit decreasing over a histogram of lengths (after Krell et al. 2021, "Efficient Sequence Packing without
Cross-contamination"): what counts is how many pieces have each length, not how many pieces there are. So a million
documents take about as long as their sorting.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.data.text.rows import RowTable

Integers = NDArray[np.int64]

# Keys the draws apart from those of an epoch's order, which begin at epoch 0.
_PACKING = 2**63 + 0x9AC4


@dataclass(frozen=True, kw_only=True, eq=False)
class Pieces:
    """Pieces of documents, in the order in which they stand in the rows.

    Attributes:
        document: Which document each is of, int64 [pieces].
        begin: Its first token in that, int64 [pieces].
        end: The one after its last, int64 [pieces].
        row: The row it stands in, ascending, int64 [pieces].
    """

    document: Integers
    begin: Integers
    end: Integers
    row: Integers


def pack(lengths: Integers, context: int, seed: int) -> Pieces:
    """Pack documents into rows of at most ``context`` tokens.

    A longer document is cut into pieces of ``context`` tokens and a rest; no other is cut. A single token at a
    document's end is left out: it has none after it, and a row of such would ask for nothing. Which of equally long
    pieces go together, and their order within a row, is drawn: long ones stand first no more often than last.

    Args:
        lengths: Tokens of each document, at least 0, int64 [documents]; those of fewer than two stand nowhere.
        context: Tokens of a row, at least 1.
        seed: Keys the draws.

    Returns:
        Each token that is not left out, once.
    """
    document, begin, end = cut(lengths, context)
    drawn = np.random.Philox(key=[seed, _PACKING]).random_raw(2 * len(document))
    sizes = end - begin
    by_length = np.lexsort((drawn[: len(document)], -sizes))
    row = np.empty(len(document), dtype=np.int64)
    row[by_length] = _rows(np.bincount(sizes, minlength=context + 1), context)
    order = np.lexsort((drawn[len(document) :], row))
    return Pieces(document=document[order], begin=begin[order], end=end[order], row=row[order])


def packed_rows(lengths: Integers, context: int, seed: int) -> RowTable:
    """Rows of whole documents, filled up as :func:`pack` does; their documents know nothing of one another.

    Args:
        lengths: Tokens of each document, int64 [documents].
        context: Tokens of a row.
        seed: Keys the draws.
    """
    pieces = pack(lengths, context, seed)
    rows = int(pieces.row[-1]) + 1 if len(pieces.row) else 0
    return RowTable.of_separate(
        pieces.document,
        pieces.begin,
        pieces.end,
        np.searchsorted(pieces.row, np.arange(rows + 1)),
        lengths=lengths,
        context=context,
    )


def cut(lengths: Integers, context: int) -> tuple[Integers, Integers, Integers]:
    """Cut documents into pieces of at most ``context`` tokens: (document, begin, end), each int64 [pieces].

    A single token that would be the last piece is left out, as :func:`~paceline.data.text.rows.single_rows` does.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    count = np.maximum(0, -(-(lengths - 1) // context))
    document = np.repeat(np.arange(len(lengths)), count)
    first = np.repeat(np.cumsum(count) - count, count)
    begin = (np.arange(len(document)) - first) * context
    return document, begin, np.minimum(begin + context, lengths[document])


def _rows(counts: Integers, context: int) -> Integers:
    """The row of each piece, the longest first, int64 [pieces].

    Args:
        counts: How many pieces have each length, from 0 to ``context``.
        context: Tokens of a row.
    """
    shelves = _Shelves(context)
    for length in np.flatnonzero(counts)[::-1].tolist():
        shelves.put(length, int(counts[length]))
    return np.concatenate(shelves.placed) if shelves.placed else np.empty(0, dtype=np.int64)


class _Shelves:
    """Rows by the room that is left in them, and where pieces went.

    Rows are numbered as they are begun. Those with the same room lie in ranges (first, end): a few, however many rows.

    Attributes:
        placed: Rows of the pieces so far, in the order in which these came.
    """

    def __init__(self, context: int) -> None:
        self.placed: list[Integers] = []
        self._context = context
        self._rows = 0
        self._rooms: list[int] = []  # ascending
        self._ranges: dict[int, list[tuple[int, int]]] = {}

    def put(self, length: int, count: int) -> None:
        """Put ``count`` pieces of one length where they leave the least room, each in turn; lengths must not grow."""
        while count:
            at = bisect_left(self._rooms, length)
            if at == len(self._rooms):
                self._begin(-(-count // (self._context // length)))
                continue
            count -= self._fill(self._rooms[at], length, count)

    def _begin(self, rows: int) -> None:
        self._give_back(self._context, (self._rows, self._rows + rows))
        self._rows += rows

    def _fill(self, room: int, length: int, count: int) -> int:
        """Fill a range of rows that have the same room, each to its end before the next; returns the pieces put."""
        first, end = self._take(room)
        each = room // length
        full = min(end - first, count // each)
        rest = count - full * each if full < end - first else 0  # fewer than ``each``
        if full:
            self.placed.append(np.repeat(np.arange(first, first + full), each))
            self._give_back(room - each * length, (first, first + full))
        after = first + full
        if rest:
            self.placed.append(np.full(rest, after))
            self._give_back(room - rest * length, (after, after + 1))
            after += 1
        self._give_back(room, (after, end))
        return full * each + rest

    def _take(self, room: int) -> tuple[int, int]:
        ranges = self._ranges[room]
        taken = ranges.pop()
        if not ranges:
            del self._ranges[room]
            self._rooms.remove(room)
        return taken

    def _give_back(self, room: int, rows: tuple[int, int]) -> None:
        if rows[0] == rows[1] or room == 0:
            return
        if room not in self._ranges:
            self._ranges[room] = []
            insort(self._rooms, room)
        self._ranges[room].append(rows)
