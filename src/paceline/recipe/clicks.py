"""The recipe's `data.recommendation` section: what a sample is made of, and how the generator is set."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from paceline.recipe.fields import STRICT, Auto, LocalPath, NonNegativeFloat, PositiveInt

CLICK_DATASETS = ("criteo", "synthetic_clicks")


_MOST_ROWS = 10**10


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Clicks:
    """Samples that are numbers and categories, and were clicked on or not."""

    max_rows: Annotated[PositiveInt, Field(ge=2, le=_MOST_ROWS)] = 100_000
    """Most rows of an embedding table. Where a feature has more values, several share a row."""
    tables: Auto | tuple[Annotated[PositiveInt, Field(ge=2, le=_MOST_ROWS)], ...] = "auto"
    """Rows of each categorical feature's table. `auto` with `criteo`: eight times the feature's values in the training
    split, at least 1,024 and at most `max_rows`; with `synthetic_clicks`: from 10 to `max_rows`, each larger by the
    same factor."""
    cache: Auto | LocalPath = "auto"
    """Folder for the binary copy that `criteo` text is turned into once; `auto` is `.paceline` beside the data, or
    where that cannot be written, the user's cache."""
    dense_features: Annotated[PositiveInt, Field(le=10_000)] = 13
    """Numbers of a sample of `synthetic_clicks`; a line of Criteo's format has 13."""
    categories: Annotated[PositiveInt, Field(le=10_000)] = 26
    """Categorical features of a sample of `synthetic_clicks`; a line of Criteo's format has 26."""
    zipf: NonNegativeFloat = 1.05
    """How long the tail of `synthetic_clicks` is: the k-th most frequent value of a feature is as frequent as 1 / k to
    this power."""
    rank: Annotated[PositiveInt, Field(le=10_000)] = 4
    """Numbers in the hidden vector of each value of `synthetic_clicks`, whose products decide what is clicked on."""
    evaluation_samples: Annotated[PositiveInt, Field(le=10**8)] = 20_000
    """Held-out samples of `synthetic_clicks`."""
