"""Batches of rows of tokens, and the tokens that are hidden in them.

Masking is BERT's (Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", 2018): of what is asked for,
80 % is hidden, 10 % replaced by any token, and 10 % left as it is. How many tokens are asked for is a function of the
sample's length alone, so that every process knows what a whole global step asks for; the places are keyed by the
sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.balance import SampleLengths
from paceline.data.pipeline import Placement, SimplePipeline
from paceline.data.random_draws import uniforms
from paceline.data.slices import SampleSlice
from paceline.data.text.corpus import TokenCorpus
from paceline.data.text.rows import NOTHING, RowTable, read_row
from paceline.data.text.tokenizer import TokenIds, Tokenizer

# Held-out samples are hidden alike in every run and epoch; these are no run's own draws.
EVALUATION_SEED = 0x6D61736B
_HIDDEN, _REPLACED = 0.8, 0.9


def masked_count(tokens: NDArray[np.int64], fraction: float) -> NDArray[np.int64]:
    """How many tokens are asked for in samples of so many, int64 [samples]: the share, rounded, and at least one."""
    counts: NDArray[np.int64] = np.maximum(1, np.floor(tokens * fraction + 0.5)).astype(np.int64)
    return counts


@dataclass(frozen=True, kw_only=True)
class Masking:
    """Hides tokens of a sample.

    Attributes:
        seed: Keys the draws.
        fraction: Share of the tokens that are asked for.
        mask: The id that hides one.
        vocabulary: Ids that may replace one.
        context: Most tokens of a sample.
    """

    seed: int
    fraction: float
    mask: int
    vocabulary: int
    context: int

    def __call__(self, tokens: TokenIds, *, epoch: int, sample: int) -> tuple[TokenIds, TokenIds]:
        """What the model sees, and what it is asked for, both int64 [T]; a function of (seed, epoch, sample)."""
        count = int(masked_count(np.array([len(tokens)]), self.fraction)[0])
        # The places' numbers come first, as many as a sample can have: what follows is keyed alike in all.
        drawn = uniforms(self.seed, epoch, np.array([sample]), self.context + 2 * count)[0]
        places = np.argsort(drawn[: len(tokens)], kind="stable")[:count]
        kinds, others = drawn[self.context :].reshape(2, count)
        seen, asked = tokens.copy(), np.full_like(tokens, NOTHING)
        asked[places] = tokens[places]
        seen[places[kinds < _HIDDEN]] = self.mask
        replaced = (kinds >= _HIDDEN) & (kinds < _REPLACED)
        seen[places[replaced]] = (others[replaced] * self.vocabulary).astype(np.int64)
        return seen, asked


_PADDING = -1  # as the number of a document


@dataclass(frozen=True, kw_only=True)
class TextSplit:
    """One split: its tokens, which of them make each sample, and what is asked of those.

    Attributes:
        lengths: How long each sample is, and how far it is padded.
        masking: Hides tokens, if hidden ones are asked for; else each token is asked for the next.
    """

    corpus: TokenCorpus
    table: RowTable
    lengths: SampleLengths
    masking: Masking | None = None

    @property
    def needs_documents(self) -> bool:
        """Whether attention must know which token belongs where; else each may look at all before it."""
        padded = bool((self.table.tokens < self.table.context).any())
        several = self.table.separate and len(self.table.documents) > len(self.table)
        return several or (padded and self.masking is not None)


class TextPipeline(SimplePipeline):
    """Training and evaluation batches of text, read in this process: tokens lie in memory, or in mapped files.

    A batch's inputs are ``tokens``, int64 [N, T]; where documents in a row know nothing of one another, or rows are
    padded that are read in both directions, also ``positions`` and ``documents``, int64 [N, T], with -1 for padding;
    and in evaluation ``bytes``, int64 [N], the bytes that the targets stand for. Its targets are int64 [N, T], -100
    where nothing is asked.
    """

    def __init__(self, *, train: TextSplit, evaluation: TextSplit, tokenizer: Tokenizer, placement: Placement) -> None:
        self._splits = {True: train, False: evaluation}
        self._tokenizer = tokenizer
        super().__init__(self._rows, evaluation_samples=len(evaluation.table), placement=placement)

    def sample_name(self, sample_id: int, *, training: bool) -> str:
        """The document that a sample begins in, and where."""
        split = self._splits[training]
        pieces = split.table.pieces(sample_id)
        document, begin, end = pieces[0]
        more = f" and {len(pieces) - 1} more" if len(pieces) > 1 else ""
        return f"{split.corpus.name(document)}[{begin}:{end}]{more}"

    def _rows(self, part: SampleSlice, training: bool) -> tuple[dict[str, Tensor], Tensor]:
        split = self._splits[training]
        shape = (len(part.ids), int(split.lengths.padded(part.ids).max()))
        pad = self._tokenizer.end if self._tokenizer.pad is None else self._tokenizer.pad
        tokens, targets = np.full(shape, pad, dtype=np.int64), np.full(shape, NOTHING, dtype=np.int64)
        positions, documents = np.zeros(shape, dtype=np.int64), np.full(shape, _PADDING, dtype=np.int64)
        for index, sample in enumerate(part.ids.tolist()):
            row = read_row(split.corpus, split.table, sample)
            size = len(row.tokens)
            seen, asked = row.tokens, row.following
            if split.masking is not None:
                seen, asked = split.masking(row.tokens, epoch=part.epoch, sample=sample)
            tokens[index, :size], targets[index, :size] = seen, asked
            positions[index, :size], documents[index, :size] = row.positions, row.documents
        inputs = {"tokens": torch.from_numpy(tokens)}
        if split.needs_documents:
            inputs |= {"positions": torch.from_numpy(positions), "documents": torch.from_numpy(documents)}
        if not training:
            counts = [self._tokenizer.bytes_of(row[row != NOTHING]) for row in targets]
            inputs["bytes"] = torch.tensor(counts, dtype=torch.int64)
        return inputs, torch.from_numpy(targets)
