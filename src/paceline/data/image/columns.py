"""Which column of a table holds the images, which the labels, and which says the split of each?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.data.image.source import Ids
from paceline.errors import DataError, did_you_mean
from paceline.recipe.data import Data

_USUAL = {
    "image": (
        *("image", "img", "images", "path", "file", "file_name", "filename", "filepath", "file_path"),
        *("image_path", "img_path", "image_file", "jpg", "png"),
    ),
    "label": ("label", "labels", "class", "target", "category", "class_name", "label_name", "fine_label", "class_id"),
    "split": ("split", "set", "subset", "partition"),
}
TRAIN_WORDS = ("train", "training")
HELD_OUT_WORDS = (("val", "valid", "validation", "dev"), ("test", "testing"))


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the recipe says of columns: a name, ``auto``, or, of the split, None for none."""

    image: str = "auto"
    label: str = "auto"
    split: str | None = "auto"

    @classmethod
    def of(cls, data: Data) -> Asked:
        """What a recipe's section says."""
        return cls(image=data.image_column, label=data.label_column, split=data.split_column)


@dataclass(frozen=True)
class Found:
    """The names of the columns in use."""

    image: str
    label: str
    split: str | None


def find_columns(asked: Asked, columns: Sequence[str], where: str) -> Found:
    """Find the columns by the names asked for, or by usual names in either case.

    Args:
        asked: What the recipe says.
        columns: What the table has.
        where: The table, for the message.

    Raises:
        DataError: If one is not there.
    """
    image, label = _found("image", asked.image, columns, where), _found("label", asked.label, columns, where)
    split = None if asked.split is None else _found("split", asked.split, columns, where)
    if image is None or label is None:
        what = "image" if image is None else "label"
        raise DataError(
            f"{where} has the columns {', '.join(columns)}, and none has a usual name of a column of "
            f"{what}s ({', '.join(_USUAL[what][:4])}, …): name it in data.{what}_column."
        )
    if image == label:
        raise DataError(f"{where}: data.image_column and data.label_column are both {image!r}: name two columns.")
    return Found(image, label, split)


def _found(what: str, asked: str, columns: Sequence[str], where: str) -> str | None:
    if asked != "auto":
        if asked in columns:
            return asked
        raise DataError(
            f"{where} has no column {asked!r} (data.{what}_column), but {', '.join(columns)}."
            f"{did_you_mean(asked, columns)}"
        )
    lowered = {name.strip().lower(): name for name in reversed(columns)}
    return next((lowered[name] for name in _USUAL[what] if name in lowered), None)


@dataclass(frozen=True)
class Parts:
    """The rows of each split.

    Attributes:
        train: Rows of the training images, int64.
        held_out: Rows of the held-out images, or None if they are to be split off.
        told: Where held-out images come from, for people; empty if they are split off.
    """

    train: Ids
    held_out: Ids | None
    told: str


def parts_of(splits: Sequence[str] | None, count: int, where: str) -> Parts:
    """Say which rows belong to which split.

    Args:
        splits: What each row says, or None where none says anything.
        count: How many rows there are.
        where: The table, for the message.

    Raises:
        DataError: If a row says what is no split, or none is for training.
    """
    if splits is None:
        return Parts(np.arange(count), None, "")
    words = np.array([each.strip().lower() for each in splits])
    known = [*TRAIN_WORDS, *(word for words in HELD_OUT_WORDS for word in words)]
    for word in np.unique(words).tolist():
        if word not in known:
            row = int(np.flatnonzero(words == word)[0])
            raise DataError(
                f"{where} says {word!r} of the split of an image (the {row + 1:,}. row), but a split is train, val or "
                f"test: correct it, or set data.split_column=off.{did_you_mean(word, known)}"
            )
    train = np.flatnonzero(np.isin(words, TRAIN_WORDS))
    if len(train) == 0:
        raise DataError(f"{where} has no row whose split is train: correct it, or set data.split_column=off.")
    found = [np.flatnonzero(np.isin(words, names)) for names in HELD_OUT_WORDS]
    validation, test = found
    if len(validation):
        unread = f"; {len(test):,} rows of test are not read" if len(test) else ""
        return Parts(train, validation, f"the rows whose split is {HELD_OUT_WORDS[0][0]}{unread}")
    return Parts(train, test, "the rows whose split is test") if len(test) else Parts(train, None, "")
