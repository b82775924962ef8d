"""Click data: numbers, categories and labels of any samples by their ids, and batches of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.batch import Batch, Progress
from paceline.data.pipeline import Placement, SimplePipeline
from paceline.data.slices import SampleIds, SampleSlice

# Beyond it, rows are read when they are asked for.
_HELD_BYTES = 2**30
_AT_ONCE = 2**16


class ClickRows(NamedTuple):
    """Some samples.

    Attributes:
        dense: Their numbers, float32 [N, dense features].
        categories: Which row of each feature's table is theirs, int64 [N, categorical features].
        labels: 1 if clicked on, else 0; uint8 [N].
    """

    dense: NDArray[np.float32]
    categories: NDArray[np.int64]
    labels: NDArray[np.uint8]


class ClickSource(Protocol):
    """One split."""

    def __len__(self) -> int:
        """Samples."""
        ...

    def read(self, ids: SampleIds) -> ClickRows:
        """The samples of these ids, in this order."""
        ...

    def name(self, sample: int) -> str:
        """Where a sample comes from, for people."""
        ...


@dataclass(frozen=True, kw_only=True)
class ClickDataset:
    """Samples that were clicked on or not, in two splits.

    Attributes:
        name: What the recipe calls it.
        train: Training samples.
        validation: Held-out samples.
        dense_features: Numbers of each sample.
        tables: Rows of each categorical feature's table.
        digest: Says whether two runs saw the same data.
        facts: What else a reader of the plan should know.
        reasons: Why a value that the recipe left open is what it is, by its dotted key.
        left_out: What is there and not used, a sentence for each kind.
    """

    name: str
    train: ClickSource
    validation: ClickSource
    dense_features: int
    tables: tuple[int, ...]
    digest: str
    facts: Mapping[str, int | str] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


class HeldRows:
    """Samples that lie in memory; satisfies :class:`ClickSource`."""

    def __init__(self, source: ClickSource) -> None:
        """Read all of another source."""
        self._source = source
        # In pieces: what is read at once takes its size several times over.
        first = source.read(np.arange(min(_AT_ONCE, len(source))))
        self._rows = ClickRows(*(np.empty((len(source), *each.shape[1:]), dtype=each.dtype) for each in first))
        for begin in range(0, len(source), _AT_ONCE):
            ids = np.arange(begin, min(begin + _AT_ONCE, len(source)))
            read = source.read(ids)
            self._rows.dense[ids] = read.dense
            self._rows.categories[ids] = read.categories
            self._rows.labels[ids] = read.labels

    def __len__(self) -> int:
        return len(self._rows.labels)

    def read(self, ids: SampleIds) -> ClickRows:
        """Copies of the rows."""
        rows = self._rows
        return ClickRows(rows.dense[ids], rows.categories[ids], rows.labels[ids])

    def name(self, sample: int) -> str:
        """As the source has it."""
        return self._source.name(sample)


def held(source: ClickSource) -> ClickSource:
    """The source itself, or its rows in memory where that takes at most 1 GiB."""
    if isinstance(source, HeldRows) or len(source) == 0:
        return source
    one = source.read(np.zeros(1, dtype=np.int64))
    return HeldRows(source) if sum(each.nbytes for each in one) * len(source) <= _HELD_BYTES else source


class ClickPipeline(SimplePipeline):
    """Batches of numbers and categories.

    Inputs are ``{"dense": float32 [N, dense features], "categories": int64 [N, categorical features]}``, targets
    float32 [N], 1 for a click. Sets of up to 1 GiB are held in memory; of others, a thread reads one batch ahead.
    """

    def __init__(self, *, train: ClickSource, evaluation: ClickSource, placement: Placement) -> None:
        self._sources = {True: train, False: evaluation}
        super().__init__(self._rows, evaluation_samples=len(evaluation), placement=placement, prefetch=1)

    def load(self, report: Progress) -> None:
        """Bring both splits to memory, where there is room."""
        for training, source in self._sources.items():
            self._sources[training] = held(source)
            report(len(source), len(source))

    def sample_name(self, sample_id: int, *, training: bool) -> str:
        """The sample's line, or its set and number."""
        return self._sources[training].name(sample_id)

    def _batches(self, slices: Iterable[SampleSlice], *, training: bool) -> Iterator[Batch]:
        self._sources[training] = source = held(self._sources[training])
        # Pages of a mapped file may have to come from a disk.
        self._threads = 0 if isinstance(source, HeldRows) else 1
        return super()._batches(slices, training=training)

    def _rows(self, part: SampleSlice, training: bool) -> tuple[dict[str, Tensor], Tensor]:
        rows = self._sources[training].read(part.ids)
        inputs = {"dense": torch.from_numpy(rows.dense), "categories": torch.from_numpy(rows.categories)}
        return inputs, torch.from_numpy(rows.labels.astype(np.float32))
