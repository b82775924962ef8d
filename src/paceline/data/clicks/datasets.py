"""Click data sets by their names in recipes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paceline.data.clicks.criteo import CATEGORIES, DENSE
from paceline.data.clicks.source import ClickDataset
from paceline.data.clicks.stored import StoredSource, stored
from paceline.data.clicks.synthetic import open_synthetic
from paceline.errors import DataError, RecipeError, did_you_mean
from paceline.files import LeftOut, visible
from paceline.recipe.clicks import Clicks
from paceline.recipe.data import Data
from paceline.references import call_reference, is_reference
from paceline.registry import installed, load

_ROWS_PER_VALUE, _SMALLEST_TABLE = 8, 1024
# Of Criteo's Kaggle Display Advertising Challenge, as DLRM's authors count them.
_KAGGLE_SAMPLES = 45_840_617
_KAGGLE_VALUES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)


def open_clicks(data: Data) -> ClickDataset:
    """Open the data set that the recipe's `data` section names.

    Raises:
        DataError: If there is no such data set, or it cannot be read.
        RecipeError: If the section does not fit the data set.
    """
    opener = _OPENERS.get(data.dataset)
    if opener is not None:
        return opener(data)
    if not is_reference(data.dataset) and data.dataset not in installed("datasets"):
        raise DataError(
            f"data.dataset is {data.dataset!r}, which holds no clicks; known are {', '.join(_OPENERS)} and "
            f"'package.module:factory'.{did_you_mean(data.dataset, _OPENERS)}"
        )
    factory = load("datasets", data.dataset, DataError)
    found = call_reference("data.dataset", data.dataset, factory, DataError, data)
    if not isinstance(found, ClickDataset):
        raise DataError(f"data.dataset={data.dataset} gave a {type(found).__name__}, not a ClickDataset.")
    return found


def open_criteo(data: Data) -> ClickDataset:
    """Text in Criteo's format: PATH/{train,val}, or a file or folder whose last lines are held out.

    Raises:
        DataError: If there is none, or lines of it are wrong.
        RecipeError: If the section does not fit it.
    """
    if data.path is None:
        raise RecipeError("data.dataset=criteo needs data.path: a folder with train and val, or a file of lines.")
    root = Path(data.path)
    if not root.exists():
        raise DataError(f"data.path={data.path} does not exist.")
    left_out = LeftOut()
    if (root / "train").is_dir() or (root / "val").is_dir():
        for split in ("train", "val"):
            if not (root / split).is_dir():
                raise DataError(
                    f"data.path={data.path} has no folder '{split}'; it must hold train and val, or files only."
                )
        for entry in visible(root):
            if entry.name not in ("train", "val"):
                left_out.add("files and folders beside train/ and val/", entry.name)
        parts = [root / "train", root / "val"]
    else:
        parts = [root]
    splits = [stored(each, data.recommendation.cache, left_out, max_broken=data.max_broken) for each in parts]
    train, val = splits[0], splits[-1]
    tables, reasons = criteo_tables(data.recommendation, train.distinct)
    kept, first = len(train.rows), 0
    if train is val:
        kept = first = kept - round(kept * data.validation_fraction)
    else:
        reasons["data.validation_fraction"] = "the data have a split of their own"
    if kept == 0:
        raise DataError(f"'{parts[0]}' leaves no line to train on, of {len(train.rows)}.")
    wrong = [each for split in splits for each in split.wrong]
    return ClickDataset(
        name=data.dataset,
        train=StoredSource(train, tables, 0, kept),
        validation=StoredSource(val, tables, first, len(val.rows)),
        dense_features=DENSE,
        tables=tables,
        digest=" ".join(each.digest for each in splits),
        facts={"lines_left_out": len(wrong), "first_left_out": str(wrong[0])} if wrong else {},
        reasons=reasons,
        left_out=left_out.told(),
    )


def criteo_tables(clicks: Clicks, distinct: tuple[int, ...]) -> tuple[tuple[int, ...], dict[str, str]]:
    """Rows of each feature's table, and why.

    Args:
        clicks: The recipe's section.
        distinct: Values of each feature.
    """
    if clicks.tables != "auto":
        if len(clicks.tables) != CATEGORIES:
            raise RecipeError(
                f"data.recommendation.tables has {len(clicks.tables)} sizes, but Criteo's format has {CATEGORIES} "
                "features; give one for each, or auto."
            )
        return clicks.tables, {}
    sizes = tuple(min(clicks.max_rows, max(_SMALLEST_TABLE, _ROWS_PER_VALUE * each)) for each in distinct)
    why = f"{_ROWS_PER_VALUE} for each value, at least {_SMALLEST_TABLE:,}, at most data.recommendation.max_rows"
    return sizes, {"data.recommendation.tables": why}


def stand_in(data: Data) -> tuple[Data, str]:
    """For Criteo's format where it is not said where the data lie: generated ones of that size, and a sentence."""
    tables, _ = criteo_tables(data.recommendation, _KAGGLE_VALUES)
    clicks = Clicks(tables=tables, dense_features=DENSE, categories=CATEGORIES)
    said = f"data.path is not set: as for Criteo's Kaggle challenge, tables of {sum(tables):,} rows in all are assumed"
    return Data(dataset="synthetic_clicks", samples=_KAGGLE_SAMPLES, recommendation=clicks), said


_OPENERS: dict[str, Callable[[Data], ClickDataset]] = {"criteo": open_criteo, "synthetic_clicks": open_synthetic}
