"""Data sets of clicks: samples of numbers and categories, clicked on or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.data.slices import SampleIds

# Larger sets are read on request.
_HELD_BYTES = 2**30


_READ_AT_ONCE = 2**16


class ClickRows(NamedTuple):
    """Some samples.

    Attributes:
        dense: Numeric features, float32 [N, dense features].
        categories: Row of each feature's table, int64 [N, categorical features].
        labels: 1 if clicked on, else 0; uint8 [N].
    """

    dense: NDArray[np.float32]
    categories: NDArray[np.int64]
    labels: NDArray[np.uint8]


class ClickSource(Protocol):
    """One split."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def read(self, ids: SampleIds) -> ClickRows:
        """Return the samples with these ids, in this order."""
        ...

    def path(self, sample: int) -> str:
        """Return a sample's origin, for people."""
        ...


@dataclass(frozen=True, kw_only=True)
class ClickDataset:
    """Clicked and unclicked samples, in two splits.

    Attributes:
        name: Name in the recipe.
        train: Training samples.
        validation: Held-out samples.
        dense_features: Number of numeric features.
        tables: Rows of each categorical feature's table.
        digest: Identifies the data.
        facts: Additional facts for the plan.
        reasons: Explanations of automatic values, by dotted key.
        left_out: Unused data, one sentence per kind.
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


class InMemoryRows:
    """Samples in memory; implements :class:`ClickSource`."""

    def __init__(self, source: ClickSource) -> None:
        """Read all samples of another source."""
        self._source = source
        first = source.read(np.arange(1))
        self._rows = ClickRows(*(np.empty((len(source), *each.shape[1:]), dtype=each.dtype) for each in first))
        # In chunks: reading needs several times the size of a chunk.
        for begin in range(0, len(source), _READ_AT_ONCE):
            ids = np.arange(begin, min(begin + _READ_AT_ONCE, len(source)))
            self._rows.dense[ids], self._rows.categories[ids], self._rows.labels[ids] = source.read(ids)

    def __len__(self) -> int:
        return len(self._rows.labels)

    def read(self, ids: SampleIds) -> ClickRows:
        """Return copies of the rows."""
        rows = self._rows
        return ClickRows(rows.dense[ids], rows.categories[ids], rows.labels[ids])

    def path(self, sample: int) -> str:
        """Return the source's name of the sample."""
        return self._source.path(sample)


def hold_in_memory(source: ClickSource) -> ClickSource:
    """Return the source itself, or its rows in memory if they take at most 1 GiB."""
    if isinstance(source, InMemoryRows) or len(source) == 0:
        return source
    first_row = source.read(np.zeros(1, dtype=np.int64))
    return InMemoryRows(source) if sum(each.nbytes for each in first_row) * len(source) <= _HELD_BYTES else source
