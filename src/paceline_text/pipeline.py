"""Batches of token rows, with masking for masked objectives.

Masking is BERT's (Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", 2018): of the tokens to
predict, 80 % are masked, 10 % are replaced by a random token, and 10 % are left unchanged. The number of tokens to
predict depends only on the sample's length, so every process knows it for a whole global step; the positions are keyed
by the sample.

A row table lists the content of each row, so that its size is known before a token is read. Whole documents are packed
into rows by best-fit decreasing over a histogram of lengths (after Krell et al. 2021, "Efficient Sequence Packing
without Cross-contamination"). The cost depends on the number of distinct lengths, not of pieces, so packing a million
documents takes about as long as sorting them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.balance import SampleLengths
from paceline.data.pipeline import Placement, SimplePipeline
from paceline.data.random_draws import uniforms
from paceline.data.slices import SampleSlice
from paceline_text.corpus import IGNORED_TARGET, StoredCorpus
from paceline_text.tokenizer import TokenIds, Tokenizer

# Held-out samples are masked identically in every run and epoch, independently of a run's seed.
EVALUATION_SEED = 0x6D61736B
_HIDDEN, _REPLACED = 0.8, 0.9


def masked_count(tokens: NDArray[np.int64], fraction: float) -> NDArray[np.int64]:
    """Return how many tokens to predict by sample length, int64 [samples]: the rounded share, at least one."""
    counts: NDArray[np.int64] = np.maximum(1, np.floor(tokens * fraction + 0.5)).astype(np.int64)
    return counts


@dataclass(frozen=True, kw_only=True)
class Masking:
    """Masks the tokens of a sample.

    Attributes:
        seed: Keys the random draws.
        fraction: Share of the tokens to predict.
        mask: Id of the mask token.
        vocabulary: Number of ids that may replace a token.
        context: Maximum number of tokens in a sample.
    """

    seed: int
    fraction: float
    mask: int
    vocabulary: int
    context: int

    def __call__(self, tokens: TokenIds, *, epoch: int, sample: int) -> tuple[TokenIds, TokenIds]:
        """Return the model's input and the targets, both int64 [T]; a function of (seed, epoch, sample)."""
        count = int(masked_count(np.array([len(tokens)]), self.fraction)[0])
        # Numbers for positions come first, for the maximum length: so later numbers have the same keys in all samples.
        drawn = uniforms(self.seed, epoch, np.array([sample]), self.context + 2 * count)[0]
        positions = np.argsort(drawn[: len(tokens)], kind="stable")[:count]
        kinds, replacements = drawn[self.context :].reshape(2, count)
        inputs, targets = tokens.copy(), np.full_like(tokens, IGNORED_TARGET)
        targets[positions] = tokens[positions]
        inputs[positions[kinds < _HIDDEN]] = self.mask
        replaced = (kinds >= _HIDDEN) & (kinds < _REPLACED)
        inputs[positions[replaced]] = (replacements[replaced] * self.vocabulary).astype(np.int64)
        return inputs, targets


_PADDING = -1  # as a document index


@dataclass(frozen=True, kw_only=True)
class TextSplit:
    """One split: its tokens, the rows of its samples, and the objective.

    Attributes:
        lengths: Length and padding of each sample.
        masking: Masks tokens for a masked objective; else each token predicts the next.
    """

    corpus: StoredCorpus
    table: RowTable
    lengths: SampleLengths
    masking: Masking | None = None

    @cached_property
    def needs_documents(self) -> bool:
        """Whether attention needs document indices; otherwise each token may attend to all earlier ones."""
        padded = bool((self.table.tokens < self.table.context).any())
        several = self.table.separate and len(self.table.documents) > len(self.table)
        return several or (padded and self.masking is not None)


class TextPipeline(SimplePipeline):
    """Training and evaluation batches of text, read in the main process from memory or mapped files.

    A batch's inputs are ``tokens``, int64 [N, T]; if documents in a row are isolated, or padded rows have bidirectional
    attention, also ``positions`` and ``documents``, int64 [N, T], with -1 for padding; in evaluation also ``bytes``,
    int64 [N], the bytes that the targets represent. Targets are int64 [N, T], -100 for positions without a prediction.
    """

    def __init__(self, *, train: TextSplit, evaluation: TextSplit, tokenizer: Tokenizer, placement: Placement) -> None:
        self._splits = {True: train, False: evaluation}
        self._tokenizer = tokenizer
        super().__init__(self._rows, evaluation_samples=len(evaluation.table), placement=placement)

    def sample_name(self, sample_id: int, *, training: bool) -> str:
        """Return the document in which a sample starts, and the position."""
        split = self._splits[training]
        pieces = split.table.pieces(sample_id)
        document, begin, end = pieces[0]
        more = f" and {len(pieces) - 1} more" if len(pieces) > 1 else ""
        return f"{split.corpus.name(document)}[{begin}:{end}]{more}"

    def _rows(self, part: SampleSlice, training: bool) -> tuple[dict[str, Tensor], Tensor]:
        split = self._splits[training]
        shape = (len(part.ids), int(split.lengths.padded(part.ids).max()))
        pad = self._tokenizer.end if self._tokenizer.pad is None else self._tokenizer.pad
        tokens, targets = np.full(shape, pad, dtype=np.int64), np.full(shape, IGNORED_TARGET, dtype=np.int64)
        positions, documents = np.zeros(shape, dtype=np.int64), np.full(shape, _PADDING, dtype=np.int64)
        for index, sample in enumerate(part.ids.tolist()):
            row = read_row(split.corpus, split.table, sample)
            size = len(row.tokens)
            row_inputs, row_targets = row.tokens, row.following
            if split.masking is not None:
                row_inputs, row_targets = split.masking(row.tokens, epoch=part.epoch, sample=sample)
            tokens[index, :size], targets[index, :size] = row_inputs, row_targets
            positions[index, :size], documents[index, :size] = row.positions, row.documents
        inputs = {"tokens": torch.from_numpy(tokens)}
        if split.needs_documents:
            inputs |= {"positions": torch.from_numpy(positions), "documents": torch.from_numpy(documents)}
        if not training:
            counts = [self._tokenizer.bytes_of(row[row != IGNORED_TARGET]) for row in targets]
            inputs["bytes"] = torch.tensor(counts, dtype=torch.int64)
        return inputs, torch.from_numpy(targets)


IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowTable:
    """The content of each row: pieces of documents, in order.

    Attributes:
        documents: The document of each piece, int64 [pieces].
        begins: Its first token, int64 [pieces].
        ends: The token after its last, int64 [pieces].
        starts: Each row's first piece, and where the last row's end; int64 [rows + 1].
        lengths: Tokens of each document, int64 [documents].
        context: Maximum number of tokens in a row.
        separate: Whether the documents in a row are isolated; otherwise they form one stream, in which the next row's
            first token follows a row's last token.
    """

    documents: IntArray
    begins: IntArray
    ends: IntArray
    starts: IntArray
    lengths: IntArray
    context: int
    separate: bool = True

    @cached_property
    def tokens(self) -> IntArray:
        """Number of tokens in each row, int64 [rows]."""
        return _segment_sums(self.ends - self.begins, self.starts)

    @cached_property
    def targets(self) -> IntArray:
        """Number of tokens in each row with a successor to predict, int64 [rows]."""
        if self.separate:
            lasts = _segment_sums(self.ends == self.lengths[self.documents], self.starts)
        else:
            lasts = self.starts[1:] == len(self.documents)
        return self.tokens - lasts

    def __len__(self) -> int:
        return len(self.starts) - 1

    def pieces(self, row: int) -> list[tuple[int, int, int]]:
        """Return a row's pieces: document, first token, and end (excluded)."""
        part = slice(self.starts[row], self.starts[row + 1])
        return list(
            zip(self.documents[part].tolist(), self.begins[part].tolist(), self.ends[part].tolist(), strict=True)
        )

    def next_piece(self, row: int) -> tuple[int, int] | None:
        """Return the document and token at which the stream continues after a row; None at its end."""
        index = self.starts[row + 1]
        return None if index == len(self.documents) else (int(self.documents[index]), int(self.begins[index]))


def chunked_rows(lengths: IntArray, context: int) -> RowTable:
    """Concatenate documents into one stream, cut every ``context`` tokens; a single token at its end is left out.

    Args:
        lengths: Tokens of each document, int64 [documents].
        context: Tokens in a row.
    """
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total = int(offsets[-1])
    rows = max(0, -(-(total - 1) // context))
    # A piece starts at the start of a document or row.
    cuts = np.unique(np.concatenate([offsets, np.arange(0, total, context, dtype=np.int64)]))
    first, after = cuts[:-1], cuts[1:]
    documents = np.searchsorted(offsets, first, side="right") - 1
    starts = np.searchsorted(first, np.arange(rows + 1, dtype=np.int64) * context)
    return RowTable(
        documents=documents,
        begins=first - offsets[documents],
        ends=after - offsets[documents],
        starts=starts,
        lengths=lengths,
        context=context,
        separate=False,
    )


def single_rows(lengths: IntArray, context: int) -> RowTable:
    """Put each document in a separate row, or several if it is longer; a single token at its end is left out.

    Args:
        lengths: Tokens of each document, int64 [documents].
        context: Maximum number of tokens in a row.
    """
    documents, begins, ends = _cut(lengths, context)
    starts = np.arange(len(documents) + 1, dtype=np.int64)
    return RowTable(documents=documents, begins=begins, ends=ends, starts=starts, lengths=lengths, context=context)


def target_count(corpus: StoredCorpus, table: RowTable) -> IntArray:
    """Return how many tokens each row predicts, int64 [rows], if the corpus says which; documents are isolated."""
    assert corpus.is_target is not None
    cumulative = np.concatenate([[0], np.cumsum(corpus.is_target)])
    first = (np.cumsum(corpus.lengths) - corpus.lengths)[table.documents]
    stops = np.minimum(table.ends + 1, corpus.lengths[table.documents])
    return _segment_sums(cumulative[first + stops] - cumulative[first + table.begins + 1], table.starts)


class TokenRow(NamedTuple):
    """The tokens of one row.

    Attributes:
        tokens: Ids, int64 [T].
        following: Next id of each token, -100 if there is none; int64 [T].
        positions: Position of each token in its document's piece, or in the row for a stream; int64 [T].
        documents: Document index of each token within the row, int64 [T]; 0 for a stream.
    """

    tokens: TokenIds
    following: TokenIds
    positions: IntArray
    documents: IntArray


def read_row(corpus: StoredCorpus, table: RowTable, row: int) -> TokenRow:
    """Read a row's tokens and the token after each."""
    pieces = table.pieces(row)
    if table.separate:
        stops = [min(end + 1, int(corpus.lengths[document])) for document, _, end in pieces]
        sizes = [end - begin for _, begin, end in pieces]
        spans = [(document, begin, stop) for (document, begin, _), stop in zip(pieces, stops, strict=True)]
        read = [corpus.read(*span) for span in spans]
        targets = [
            np.where(corpus.target_mask(*span), ids, IGNORED_TARGET)[1:] for ids, span in zip(read, spans, strict=True)
        ]
        after = [np.append(ids, [IGNORED_TARGET] * (n - len(ids))) for ids, n in zip(targets, sizes, strict=True)]
        tokens = np.concatenate([ids[:n] for ids, n in zip(read, sizes, strict=True)])
        positions = np.concatenate([np.arange(n, dtype=np.int64) for n in sizes])
        documents = np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)
        return TokenRow(tokens, np.concatenate(after).astype(np.int64), positions, documents)
    parts, following = [corpus.read(*piece) for piece in pieces], table.next_piece(row)
    parts.append(np.array([IGNORED_TARGET]) if following is None else corpus.read(*following, following[1] + 1))
    stream = np.concatenate(parts)
    size = len(stream) - 1
    return TokenRow(stream[:-1], stream[1:], np.arange(size, dtype=np.int64), np.zeros(size, dtype=np.int64))


def _segment_sums(values: IntArray, starts: IntArray) -> IntArray:
    """Return sums of consecutive values, from each start to the next."""
    return np.diff(np.concatenate([[0], np.cumsum(values)])[starts])


# Separates these draws from those of an epoch's order, which start at epoch 0.
_PACKING = 2**63 + 0x9AC4


def packed_rows(lengths: IntArray, context: int, seed: int) -> RowTable:
    """Pack whole documents into rows by best-fit decreasing; documents in a row are isolated.

    A document of more than ``context`` tokens is cut into pieces of ``context`` tokens and a rest; no other is cut. A
    single token at a document's end is left out: it has no successor, and a row of such tokens would have no targets.
    The grouping of equally long pieces and their order within a row are random, so that long ones are not always first.

    Args:
        lengths: Tokens of each document, at least 0, int64 [documents]; documents of fewer than two are left out.
        context: Tokens of a row, at least 1.
        seed: Keys the random draws.
    """
    document, begin, end = _cut(lengths, context)
    drawn = np.random.Philox(key=[seed, _PACKING]).random_raw(2 * len(document))
    sizes = end - begin
    by_length = np.lexsort((drawn[: len(document)], -sizes))
    counts, shelves = np.bincount(sizes, minlength=context + 1), _OpenRows(context)
    for length in np.flatnonzero(counts)[::-1].tolist():
        shelves.put(length, int(counts[length]))
    row = np.empty(len(document), dtype=np.int64)
    row[by_length] = np.concatenate([np.empty(0, dtype=np.int64), *shelves.placed])
    order = np.lexsort((drawn[len(document) :], row))
    starts = np.searchsorted(row[order], np.arange(row.max(initial=-1) + 2))
    return RowTable(
        documents=document[order],
        begins=begin[order],
        ends=end[order],
        starts=starts,
        lengths=lengths,
        context=context,
    )


def _cut(lengths: IntArray, context: int) -> tuple[IntArray, IntArray, IntArray]:
    """Cut documents into pieces of at most ``context`` tokens: (document, start, end), each int64 [pieces].

    A last piece of a single token is left out.
    """
    count = np.maximum(0, -(-(lengths - 1) // context))
    document = np.repeat(np.arange(len(lengths)), count)
    begin = (np.arange(len(document)) - np.repeat(np.cumsum(count) - count, count)) * context
    return document, begin, np.minimum(begin + context, lengths[document])


class _OpenRows:
    """Rows by remaining room, and the assignment of pieces.

    Rows are numbered in order of creation. Rows with the same room form ranges (first, end), of which there are few.

    Attributes:
        placed: Row of each piece so far, in order of insertion.
    """

    def __init__(self, context: int) -> None:
        self.placed: list[IntArray] = []
        self._context = context
        self._rows = 0
        self._rooms: list[int] = []  # ascending
        self._ranges: dict[int, list[tuple[int, int]]] = {}

    def put(self, length: int, count: int) -> None:
        """Put ``count`` pieces of one length into the rows with the tightest fit, one by one; lengths must not grow."""
        while count:
            index = bisect_left(self._rooms, length)
            if index == len(self._rooms):
                rows = -(-count // (self._context // length))
                self._add_rows(self._context, (self._rows, self._rows + rows))
                self._rows += rows
            else:
                count -= self._fill(self._rooms[index], length, count)

    def _fill(self, room: int, length: int, count: int) -> int:
        """Fill a range of rows with the same room, one row after the other; return the number of pieces placed."""
        first, end = self._ranges[room].pop()
        if not self._ranges[room]:
            del self._ranges[room]
            self._rooms.remove(room)
        each = room // length
        full = min(end - first, count // each)
        rest = count - full * each if full < end - first else 0  # fewer than ``each``
        if full:
            self.placed.append(np.repeat(np.arange(first, first + full), each))
            self._add_rows(room - each * length, (first, first + full))
        after = first + full
        if rest:
            self.placed.append(np.full(rest, after))
            self._add_rows(room - rest * length, (after, after + 1))
            after += 1
        self._add_rows(room, (after, end))
        return full * each + rest

    def _add_rows(self, room: int, rows: tuple[int, int]) -> None:
        if rows[0] == rows[1] or room == 0:
            return
        if room not in self._ranges:
            self._ranges[room] = []
            insort(self._rooms, room)
        self._ranges[room].append(rows)


def padding(tokenizer: Tokenizer) -> int:
    """Return the id of the padding token: if there is none, the end token's."""
    return tokenizer.end if tokenizer.pad is None else tokenizer.pad


def padded(texts: list[TokenIds], width: int, tokenizer: Tokenizer) -> dict[str, torch.Tensor]:
    """Return texts as a batch: ``tokens``, and ``mask``, 1 for tokens and 0 for padding; both int64 [N, width]."""
    tokens = np.full((len(texts), width), padding(tokenizer), dtype=np.int64)
    mask = np.zeros_like(tokens)
    for row, ids in enumerate(texts):
        tokens[row, : len(ids)], mask[row, : len(ids)] = ids, 1
    return {"tokens": torch.from_numpy(tokens), "mask": torch.from_numpy(mask)}
