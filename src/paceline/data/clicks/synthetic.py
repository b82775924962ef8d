"""Clicks that nobody made: drawn by a rule that is known, so that the best possible answer is known too.

Every number of a sample is a pure function of its id. A hidden vector and a hidden number belong to each value of each
categorical feature, and to each dense feature. What a sample is worth is the sum of its hidden numbers and of all
products of two of its hidden vectors, which is what a network with dot products between embeddings can learn (Rendle
2010). It is clicked on with the probability that the logistic function makes of that.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from paceline.data.clicks.source import ClickDataset, ClickRows
from paceline.data.random_draws import uniforms
from paceline.data.slices import SampleIds
from paceline.errors import RecipeError
from paceline.recipe.clicks import Clicks
from paceline.recipe.data import Data

Numbers = NDArray[np.float64]

_KEY = 0x636C69636B73
_VERSION = 1
# Which numbers are drawn: Philox's second key, as epochs are elsewhere.
_TRAIN, _VALIDATION, _DENSE, _FIRST_TABLE = range(4)
_PER_BELL = 4
_SMALLEST_TABLE = 10
# A quarter or so is clicked on, as of Criteo's.
_BIAS = -1.6
_LINEAR, _PRODUCTS = 1.5, 1.0
_AT_ONCE = 8192
# Of larger tables, which stand for real ones, samples use so many rows.
_MOST_USED = 100_000


class SyntheticClicks:
    """One split; satisfies :class:`~paceline.data.clicks.source.ClickSource`."""

    def __init__(self, clicks: Clicks, tables: tuple[int, ...], samples: int, *, training: bool) -> None:
        self._clicks = clicks
        self._tables = tuple(min(rows, _MOST_USED) for rows in tables)
        self._samples = samples
        self._stream = _TRAIN if training else _VALIDATION

    def __len__(self) -> int:
        return self._samples

    def name(self, sample: int) -> str:
        """The split and the number."""
        return f"synthetic_clicks {'train' if self._stream == _TRAIN else 'validation'} {sample}"

    def read(self, ids: SampleIds) -> ClickRows:
        """Draw samples."""
        parts = [self._drawn(ids[at : at + _AT_ONCE]) for at in range(0, len(ids), _AT_ONCE)] or [self._drawn(ids)]
        dense, categories, wanted, drawn = (np.concatenate(each) for each in zip(*parts, strict=True))
        return ClickRows(dense.astype(np.float32), categories, (drawn < wanted).astype(np.uint8))

    def probabilities(self, ids: SampleIds) -> Numbers:
        """With which probability samples are clicked on, [N]: no answer can be better."""
        parts = [self._drawn(ids[at : at + _AT_ONCE])[2] for at in range(0, len(ids), _AT_ONCE)]
        return np.concatenate(parts)

    def _drawn(self, ids: SampleIds) -> tuple[Numbers, NDArray[np.int64], Numbers, Numbers]:
        """Numbers, categories, probability and the draw that decides, of few samples."""
        features, numbers = len(self._tables), self._clicks.dense_features
        drawn = uniforms(_KEY, self._stream, ids, 1 + features + _PER_BELL * numbers)
        dense = _bells(drawn[:, 1 + features :], numbers)
        columns = zip(self._frequencies, drawn[:, 1 : 1 + features].T, strict=True)
        categories = np.stack([np.searchsorted(sums, column, side="right") for sums, column in columns], axis=1)
        return dense, categories, self._probability(dense, categories), drawn[:, 0]

    def _probability(self, dense: Numbers, categories: NDArray[np.int64]) -> Numbers:
        rank, features = self._clicks.rank, len(self._tables)
        of_dense = self._hidden_of_dense / math.sqrt(len(self._hidden_of_dense))
        mixed = dense @ of_dense  # [N, 1 + rank]: the numbers count as one feature
        hidden = [mixed, *(table[categories[:, index]] for index, table in enumerate(self._hidden))]
        every = np.stack(hidden)  # [1 + features, N, 1 + rank]
        linear = every[:, :, 0].sum(axis=0) / math.sqrt(features + 1)
        vectors = every[:, :, 1:]
        # The sum over pairs, from the square of the sum (Rendle 2010, lemma 3.1).
        pairs = (vectors.sum(axis=0) ** 2).sum(axis=1) - (vectors**2).sum(axis=(0, 2))
        products = pairs / 2 / math.sqrt(rank * features * (features + 1) / 2)
        probability: Numbers = 1 / (1 + np.exp(-(_BIAS + _LINEAR * linear + _PRODUCTS * products)))
        return probability

    @cached_property
    def _hidden(self) -> list[Numbers]:
        """A number and a vector for each value of each feature, [rows, 1 + rank]."""
        width = 1 + self._clicks.rank
        return [
            _bells(uniforms(_KEY, _FIRST_TABLE + index, np.arange(rows), _PER_BELL * width), width)
            for index, rows in enumerate(self._tables)
        ]

    @cached_property
    def _hidden_of_dense(self) -> Numbers:
        width = 1 + self._clicks.rank
        return _bells(uniforms(_KEY, _DENSE, np.arange(self._clicks.dense_features), _PER_BELL * width), width)

    @cached_property
    def _frequencies(self) -> list[Numbers]:
        """For each feature, the share of samples that have this value or a more frequent one, below the last."""
        weights = [np.arange(1, rows + 1) ** -float(self._clicks.zipf) for rows in self._tables]
        return [np.cumsum(each / each.sum())[:-1] for each in weights]


def open_synthetic(data: Data) -> ClickDataset:
    """The generator as the recipe sets it.

    Raises:
        RecipeError: If the tables are not as many as the categories.
    """
    clicks = data.recommendation
    tables, reasons = table_sizes(clicks)
    train = SyntheticClicks(clicks, tables, data.samples, training=True)
    return ClickDataset(
        name=data.dataset,
        train=train,
        validation=SyntheticClicks(clicks, tables, clicks.evaluation_samples, training=False),
        dense_features=clicks.dense_features,
        tables=tables,
        digest=f"synthetic_clicks {_VERSION} {clicks.dense_features} {list(tables)} {clicks.zipf} {clicks.rank} "
        f"{data.samples} {clicks.evaluation_samples}",
        reasons=reasons,
    )


def table_sizes(clicks: Clicks) -> tuple[tuple[int, ...], dict[str, str]]:
    """Rows of each table, and why."""
    count = clicks.categories
    if clicks.tables != "auto":
        if len(clicks.tables) != count:
            raise RecipeError(
                f"data.recommendation.tables has {len(clicks.tables)} sizes, but there are "
                f"data.recommendation.categories={count} features; give one for each, or auto."
            )
        return clicks.tables, {}
    smallest = min(_SMALLEST_TABLE, clicks.max_rows)
    factor = (clicks.max_rows / smallest) ** (1 / max(1, count - 1))
    sizes = tuple(round(smallest * factor**index) for index in range(count))
    return sizes, {"data.recommendation.tables": f"from {sizes[0]:,} to {sizes[-1]:,}, each larger by the same factor"}


def _bells(drawn: Numbers, count: int) -> Numbers:
    """Nearly normal numbers of mean 0 and variance 1, [N, count]: sums of four uniform ones, whose bits no library
    decides."""
    sums = drawn.reshape(len(drawn), count, _PER_BELL).sum(axis=2)
    bells: Numbers = (sums - _PER_BELL / 2) * math.sqrt(12 / _PER_BELL)
    return bells
