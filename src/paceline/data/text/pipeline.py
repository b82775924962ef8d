"""How do rows of tokens become the stream of batches that a run trains on?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data.balance import SampleLengths
from paceline.data.batch import Batch, Progress
from paceline.data.order import StepGeometry, evaluation_slices
from paceline.data.pipeline import Placement
from paceline.data.prefetch import as_they_are, pinned, to_device
from paceline.data.slices import SampleSlice
from paceline.data.text.corpus import TokenCorpus
from paceline.data.text.masking import Masking
from paceline.data.text.rows import NOTHING, RowTable, read_row
from paceline.data.text.tokenizer import Tokenizer
from paceline.world import World

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


class TextPipeline:
    """Training and evaluation batches of text, read in this process: tokens lie in memory, or in mapped files.

    A batch's inputs are ``tokens``, int64 [N, T]; where documents in a row know nothing of one another, or rows are
    padded that are read in both directions, also ``positions`` and ``documents``, int64 [N, T], with -1 for padding;
    and in evaluation ``bytes``, int64 [N], the bytes that the targets stand for. Its targets are int64 [N, T], -100
    where nothing is asked.
    """

    def __init__(self, *, train: TextSplit, evaluation: TextSplit, tokenizer: Tokenizer, placement: Placement) -> None:
        self._train, self._evaluation = train, evaluation
        self._tokenizer = tokenizer
        self._placement = placement
        self._moving: Callable[[], AbstractContextManager[Any]] = nullcontext

    def start(self, *, training: bool, evaluation: bool) -> None:
        """There are no loader processes."""

    def load(self, report: Progress) -> None:
        """Nothing is to be read ahead."""

    def timed_by(self, moving: Callable[[], AbstractContextManager[Any]]) -> None:
        """Enter what ``moving`` gives where a training step waits for a batch to be brought to the device."""
        self._moving = moving

    def train_batches(self, geometry: StepGeometry, first: int, last: int, world: World) -> Iterator[Batch]:
        """This process's micro-batches of the steps ``first`` to ``last`` (excluded)."""
        slices = geometry.stream(first, last, world)
        read = (pinned(self._read(self._train, each), self._placement) for each in slices)
        return to_device(read, as_they_are, self._placement, moving=self._moving)

    def evaluation_batches(self, batch_size: int, world: World) -> Iterator[Batch]:
        """This process's part of the evaluation samples."""
        slices = evaluation_slices(len(self._evaluation.table), batch_size, world)
        read = (self._with_bytes(self._read(self._evaluation, each)) for each in slices)
        read = (pinned(batch, self._placement) for batch in read)
        return to_device(read, as_they_are, self._placement)

    def sample_name(self, sample_id: int, *, training: bool) -> str:
        """The document that a sample begins in, and where."""
        split = self._train if training else self._evaluation
        pieces = split.table.pieces(sample_id)
        document, begin, end = pieces[0]
        more = f" and {len(pieces) - 1} more" if len(pieces) > 1 else ""
        return f"{split.corpus.name(document)}[{begin}:{end}]{more}"

    def close(self) -> None:
        """Nothing is held that needs closing."""

    def _read(self, split: TextSplit, part: SampleSlice) -> Batch:
        rows = [read_row(split.corpus, split.table, int(each)) for each in part.ids]
        shape = (len(rows), int(split.lengths.padded(part.ids).max()))
        pad = self._tokenizer.end if self._tokenizer.pad is None else self._tokenizer.pad
        tokens, targets = np.full(shape, pad, dtype=np.int64), np.full(shape, NOTHING, dtype=np.int64)
        positions, documents = np.zeros(shape, dtype=np.int64), np.full(shape, _PADDING, dtype=np.int64)
        for index, (sample, row) in enumerate(zip(part.ids.tolist(), rows, strict=True)):
            size = len(row.tokens)
            seen, asked = row.tokens, row.following
            if split.masking is not None:
                seen, asked = split.masking(row.tokens, epoch=part.epoch, sample=sample)
            tokens[index, :size], targets[index, :size] = seen, asked
            positions[index, :size], documents[index, :size] = row.positions, row.documents
        inputs = {"tokens": torch.from_numpy(tokens)}
        if split.needs_documents:
            inputs |= {"positions": torch.from_numpy(positions), "documents": torch.from_numpy(documents)}
        return Batch(inputs, torch.from_numpy(targets), part.ids, part)

    def _with_bytes(self, batch: Batch) -> Batch:
        asked: NDArray[np.int64] = batch.targets.numpy()
        counts = [self._tokenizer.bytes_of(row[row != NOTHING]) for row in asked]
        inputs = {**batch.inputs, "bytes": torch.tensor(counts, dtype=torch.int64)}
        return Batch(inputs, batch.targets, batch.ids, batch.slice)
