"""Click data sets by their recipe names: Criteo's, and synthetic clicks drawn by a known rule.

The best possible prediction is known for synthetic clicks. All values of a sample are pure functions of its id. Each
value of each categorical feature, and each dense feature, has a hidden vector and a hidden number. A sample's score is
the sum of its hidden numbers and of all dot products of two of its hidden vectors, which a network with dot products
between embeddings can learn (Rendle 2010). The click probability is the logistic function of the score.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.random_draws import uniforms
from paceline.data.slices import SampleIds
from paceline.errors import DataError, RecipeError
from paceline.parsing.files import SkippedItems, visible_entries
from paceline.plugins.dataset_registry import StandIn, dataset, open_registered
from paceline.recipe.data import Clicks, Data
from paceline_recsys.dataset import ClickDataset, ClickRows
from paceline_recsys.sets.criteo import CATEGORIES, DENSE, StoredSource, load_clicks

Numbers = NDArray[np.float64]

_KEY = 0x636C69636B73
_VERSION = 1
# Selects the random stream: Philox's second key, where other draws have the epoch.
_TRAIN, _VALIDATION, _DENSE, _FIRST_TABLE = range(4)
_PER_BELL = 4
_SMALLEST_DRAWN_TABLE = 10
# About a quarter are clicks, as in Criteo's data.
_BIAS = -1.6
_LINEAR, _PRODUCTS = 1.5, 1.0
_AT_ONCE = 8192
# Samples use at most this many rows of larger tables, which imitate real ones.
_MOST_USED = 100_000


class SyntheticClicks:
    """One split; implements :class:`~paceline_recsys.dataset.ClickSource`."""

    def __init__(self, clicks: Clicks, tables: tuple[int, ...], samples: int, *, training: bool) -> None:
        self._clicks = clicks
        self._tables = tuple(min(rows, _MOST_USED) for rows in tables)
        self._samples = samples
        self._stream = _TRAIN if training else _VALIDATION

    def __len__(self) -> int:
        return self._samples

    def path(self, sample: int) -> str:
        """Return the split and the number."""
        return f"synthetic_clicks {'train' if self._stream == _TRAIN else 'validation'} {sample}"

    def read(self, ids: SampleIds) -> ClickRows:
        """Draw samples."""
        dense, categories, probabilities, labels = self._draw_all(ids)
        return ClickRows(dense.astype(np.float32), categories, (labels < probabilities).astype(np.uint8))

    def probabilities(self, ids: SampleIds) -> Numbers:
        """Return the true click probabilities of samples, [N]: the best possible prediction."""
        probabilities: Numbers = self._draw_all(ids)[2]
        return probabilities

    def _draw_all(self, ids: SampleIds) -> list[NDArray[Any]]:
        parts = [self._draw(ids[start : start + _AT_ONCE]) for start in range(0, max(1, len(ids)), _AT_ONCE)]
        return [np.concatenate(each) for each in zip(*parts, strict=True)]

    def _draw(self, ids: SampleIds) -> tuple[Numbers, NDArray[np.int64], Numbers, Numbers]:
        """Return the features, the probability, and the random number that decides the label, of a few samples."""
        features, numbers = len(self._tables), self._clicks.dense_features
        draws = uniforms(_KEY, self._stream, ids, 1 + features + _PER_BELL * numbers)
        dense = _normals(draws[:, 1 + features :], numbers)
        columns = zip(self._frequencies, draws[:, 1 : 1 + features].T, strict=True)
        categories = np.stack([np.searchsorted(sums, column, side="right") for sums, column in columns], axis=1)
        return dense, categories, self._probability(dense, categories), draws[:, 0]

    def _probability(self, dense: Numbers, categories: NDArray[np.int64]) -> Numbers:
        rank, features = self._clicks.rank, len(self._tables)
        of_dense = self._hidden_of_dense / math.sqrt(len(self._hidden_of_dense))
        mixed = dense @ of_dense  # [N, 1 + rank]: the dense features count as one feature
        hidden = [mixed, *(table[categories[:, index]] for index, table in enumerate(self._hidden))]
        every = np.stack(hidden)  # [1 + features, N, 1 + rank]
        linear = every[:, :, 0].sum(axis=0) / math.sqrt(features + 1)
        vectors = every[:, :, 1:]
        # The sum over pairs, computed from the square of the sum (Rendle 2010, lemma 3.1).
        pairs = (vectors.sum(axis=0) ** 2).sum(axis=1) - (vectors**2).sum(axis=(0, 2))
        products = pairs / 2 / math.sqrt(rank * features * (features + 1) / 2)
        probability: Numbers = 1 / (1 + np.exp(-(_BIAS + _LINEAR * linear + _PRODUCTS * products)))
        return probability

    @cached_property
    def _hidden(self) -> list[Numbers]:
        """Return a number and a vector for each value of each feature, [rows, 1 + rank]."""
        width = 1 + self._clicks.rank
        return [
            _normals(uniforms(_KEY, _FIRST_TABLE + index, np.arange(rows), _PER_BELL * width), width)
            for index, rows in enumerate(self._tables)
        ]

    @cached_property
    def _hidden_of_dense(self) -> Numbers:
        width = 1 + self._clicks.rank
        return _normals(uniforms(_KEY, _DENSE, np.arange(self._clicks.dense_features), _PER_BELL * width), width)

    @cached_property
    def _frequencies(self) -> list[Numbers]:
        """Return each feature's cumulative frequencies: the share of samples with this or a more frequent value."""
        weights = [np.arange(1, rows + 1) ** -float(self._clicks.zipf) for rows in self._tables]
        return [np.cumsum(each / each.sum())[:-1] for each in weights]


@dataset("synthetic_clicks", kind="clicks", keys=("samples", "recommendation"))
def open_synthetic(data: Data) -> ClickDataset:
    """Open the generator with the recipe's settings.

    Raises:
        RecipeError: If the number of tables differs from the number of categories.
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
    """Return the rows of each table, with the reason."""
    count = clicks.categories
    if clicks.tables != "auto":
        return _resize_tables(clicks.tables, count, f"there are data.recommendation.categories={count}"), {}
    smallest = min(_SMALLEST_DRAWN_TABLE, clicks.max_rows)
    factor = (clicks.max_rows / smallest) ** (1 / max(1, count - 1))
    sizes = tuple(round(smallest * factor**index) for index in range(count))
    return sizes, {"data.recommendation.tables": f"from {sizes[0]:,} to {sizes[-1]:,}, each larger by the same factor"}


def _resize_tables(tables: tuple[int, ...], count: int, key: str) -> tuple[int, ...]:
    if len(tables) != count:
        raise RecipeError(
            f"data.recommendation.tables has {len(tables)} sizes, but {key} features; give one for each, or auto.",
            key="data.recommendation.tables",
        )
    return tables


def _normals(draws: Numbers, count: int) -> Numbers:
    """Return nearly normal numbers with mean 0 and variance 1, [N, count].

    They are sums of four uniform numbers, which are bit-identical for all libraries.
    """
    sums = draws.reshape(len(draws), count, _PER_BELL).sum(axis=2)
    bells: Numbers = (sums - _PER_BELL / 2) * math.sqrt(12 / _PER_BELL)
    return bells


_ROWS_PER_VALUE, _SMALLEST_TABLE = 8, 1024
# From Criteo's Kaggle Display Advertising Challenge, as counted by DLRM's authors.
_KAGGLE_SAMPLES = 45_840_617
_KAGGLE_VALUES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)


def open_clicks(data: Data) -> ClickDataset:
    """Open the data set named in the recipe's `data` section.

    Raises:
        DataError: If the data set does not exist or cannot be read.
        RecipeError: If the section does not fit the data set.
    """
    return open_registered(data.dataset, {"clicks": ClickDataset}, data)


def placeholder(data: Data) -> tuple[Data, str]:
    """Return synthetic data of that size if Criteo's path is not given, and a sentence that says so."""
    tables, _ = criteo_tables(data.recommendation, _KAGGLE_VALUES)
    clicks = Clicks(tables=tables, dense_features=DENSE, categories=CATEGORIES)
    notice = (
        f"data.path is not set: as for Criteo's Kaggle challenge, tables of {sum(tables):,} rows in all are assumed"
    )
    return Data(dataset="synthetic_clicks", samples=_KAGGLE_SAMPLES, recommendation=clicks), notice


@dataset("criteo", kind="clicks", keys=("path", "validation_fraction", "recommendation"), stand_in=StandIn(placeholder))
def open_criteo(data: Data) -> ClickDataset:
    """Open text in Criteo's format: PATH/{train,val}, or a file or folder whose last lines are held out.

    Raises:
        DataError: If it does not exist, or has invalid lines.
        RecipeError: If the section does not fit it.
    """
    root = data.needed_path("a folder with train and val, or a file of lines")
    if not root.exists():
        raise DataError(f"data.path={data.path} does not exist.", key="data.path", path=data.path)
    left_out = SkippedItems()
    parts = [root / "train", root / "val"]
    missing = [each.name for each in parts if not each.is_dir()]
    if len(missing) == 1:
        raise DataError(
            f"data.path={data.path} has no folder '{missing[0]}'; it must hold train and val, or files only.",
            key="data.path",
            path=data.path,
        )
    if missing:
        parts = [root]
    else:
        for entry in visible_entries(root):
            if entry.name not in ("train", "val"):
                left_out.add("files and folders other than train/ and val/", entry.name)
    splits = [load_clicks(each, data.recommendation.cache, left_out, max_broken=data.broken_limit) for each in parts]
    train, val = splits[0], splits[-1]
    tables, reasons = criteo_tables(data.recommendation, train.distinct)
    count, first = len(train.rows), 0
    if train is val and not data.score_all:
        count = first = count - round(count * data.validation_fraction)
    elif train is not val:
        reasons["data.validation_fraction"] = "the data have their own split"
    if count == 0:
        raise DataError(f"'{parts[0]}' leaves no line to train on, of {len(train.rows)}.", path=parts[0])
    faults = [each for split in splits for each in split.faults]
    return ClickDataset(
        name=data.dataset,
        train=StoredSource(train, tables, 0, count),
        validation=StoredSource(val, tables, first, len(val.rows)),
        dense_features=DENSE,
        tables=tables,
        digest=" ".join(each.digest for each in splits),
        facts={"lines_left_out": len(faults), "first_left_out": str(faults[0])} if faults else {},
        reasons=reasons,
        left_out=left_out.summaries(),
    )


def criteo_tables(clicks: Clicks, distinct: tuple[int, ...]) -> tuple[tuple[int, ...], dict[str, str]]:
    """Return the rows of each feature's table, with the reason.

    Args:
        clicks: The recipe's section.
        distinct: Distinct values of each feature.
    """
    if clicks.tables != "auto":
        return _resize_tables(clicks.tables, CATEGORIES, f"Criteo's format has {CATEGORIES}"), {}
    sizes = tuple(min(clicks.max_rows, max(_SMALLEST_TABLE, _ROWS_PER_VALUE * each)) for each in distinct)
    reason = f"{_ROWS_PER_VALUE} for each value, at least {_SMALLEST_TABLE:,}, at most data.recommendation.max_rows"
    return sizes, {"data.recommendation.tables": reason}
