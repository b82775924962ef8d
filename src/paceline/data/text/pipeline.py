"""How do rows of tokens become the stream of batches that a run trains on?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data.batch import Batch, Progress
from paceline.data.nested import Nested
from paceline.data.order import StepGeometry, evaluation_slices
from paceline.data.pipeline import Placement
from paceline.data.prefetch import to_device
from paceline.data.slices import SampleSlice
from paceline.data.text.corpus import TokenCorpus
from paceline.data.text.masking import Masking
from paceline.data.text.rows import NOTHING, RowTable, read_row
from paceline.data.text.tokenizer import Tokenizer
from paceline.world import World

_PADDING = -1  # as the number of a document
_STEP = 8  # rows of different lengths are padded to multiples of this


@dataclass(frozen=True, kw_only=True)
class TextSplit:
    """One split: its tokens, which of them make each sample, and what is asked of those.

    Attributes:
        masking: Hides tokens, if hidden ones are asked for; else each token is asked for the next.
    """

    corpus: TokenCorpus
    table: RowTable
    masking: Masking | None = None

    @property
    def needs_documents(self) -> bool:
        """Whether attention must know which token belongs where; else each may look at all before it."""
        padded = bool((self.table.tokens < self.table.context).any())
        return self.table.separate or (padded and self.masking is not None)


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
        read = (self._pinned(self._read(self._train, each)) for each in slices)
        return to_device(read, _as_it_is, self._placement, moving=self._moving)

    def evaluation_batches(self, batch_size: int, world: World) -> Iterator[Batch]:
        """This process's part of the evaluation samples."""
        slices = evaluation_slices(len(self._evaluation.table), batch_size, world)
        read = (self._pinned(self._with_bytes(self._read(self._evaluation, each))) for each in slices)
        return to_device(read, _as_it_is, self._placement)

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
        table = split.table
        rows = [read_row(split.corpus, table, int(each)) for each in part.ids]
        longest = max(len(row.tokens) for row in rows)
        # One shape for all where rows are full; else no wider than these need.
        width = min(-(-longest // _STEP) * _STEP, table.context) if table.separate else table.context
        shape = (len(rows), width)
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

    def _pinned(self, batch: Batch) -> Batch:
        # From other memory, a copy to the device would make the host wait.
        return batch.pin_memory() if self._placement.device.type == "cuda" else batch


def _as_it_is(inputs: Nested) -> Nested:
    return inputs
