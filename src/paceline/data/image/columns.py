"""Columns and splits of tables of images: which column holds what, and which rows and files belong to which split."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from paceline.data.image.source import Ids
from paceline.errors import DataError, did_you_mean
from paceline.files import LeftOut, files_below, has_ending
from paceline.recipe.data import Data

TRAIN, VALIDATION, TEST = "train", "validation", "test"
_WORDS = {
    TRAIN: ("train", "training"),
    VALIDATION: ("val", "valid", "validation", "dev"),
    TEST: ("test", "testing"),
}
_USUAL = {
    "image": (
        *("image", "img", "images", "path", "file", "file_name", "filename", "filepath", "file_path"),
        *("image_path", "img_path", "image_file", "jpg", "png"),
    ),
    "label": ("label", "labels", "class", "target", "category", "class_name", "label_name", "fine_label", "class_id"),
    "split": ("split", "set", "subset", "partition"),
}
# As the hub names the pieces of a split.
_OF_THE_HUB = re.compile(r"(.+)-\d{5}-of-\d{5}(-[0-9a-f]+)?\.parquet")


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


class Found(NamedTuple):
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
    lowered = {name.strip().lower(): name for name in reversed(columns)}

    def find(what: str, name: str | None) -> str | None:
        if name == "auto":
            return next((lowered[usual] for usual in _USUAL[what] if usual in lowered), None)
        if name is None or name in columns:
            return name
        raise DataError(
            f"{where} has no column {name!r} (data.{what}_column), but {', '.join(columns)}."
            f"{did_you_mean(name, columns)}"
        )

    image, label, split = find("image", asked.image), find("label", asked.label), find("split", asked.split)
    if image is None or label is None:
        what = "image" if image is None else "label"
        raise DataError(
            f"{where} has the columns {', '.join(columns)}, and none has a usual name of a column of "
            f"{what}s ({', '.join(_USUAL[what][:4])}, …): name it in data.{what}_column."
        )
    if image == label:
        raise DataError(f"{where}: data.image_column and data.label_column are both {image!r}: name two columns.")
    return Found(image, label, split)


class Parts(NamedTuple):
    """The rows of each split.

    Attributes:
        train: Rows of the training images, int64.
        held_out: Rows of the held-out images, or None if they are to be split off.
        told: Where held-out images come from, for people; empty if they are split off.
    """

    train: Ids
    held_out: Ids | None
    told: str

    @property
    def splits(self) -> list[Ids]:
        """The rows of the training images, and of the held-out ones if there are any."""
        return [self.train] if self.held_out is None else [self.train, self.held_out]


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
    known = [word for names in _WORDS.values() for word in names]
    for word in np.unique(words).tolist():
        if word not in known:
            row = int(np.flatnonzero(words == word)[0])
            raise DataError(
                f"{where} says {word!r} of the split of an image (the {row + 1:,}. row), but a split is train, val or "
                f"test: correct it, or set data.split_column=off.{did_you_mean(word, known)}"
            )
    train, validation, test = (np.flatnonzero(np.isin(words, names)) for names in _WORDS.values())
    if len(train) == 0:
        raise DataError(f"{where} has no row whose split is train: correct it, or set data.split_column=off.")
    if len(validation):
        unread = f"; {len(test):,} rows of test are not read" if len(test) else ""
        return Parts(train, validation, f"the rows whose split is val{unread}")
    return Parts(train, test, "the rows whose split is test") if len(test) else Parts(train, None, "")


def files_ending_in(ending: str, root: Path, left_out: LeftOut) -> list[Path]:
    """The files below a folder that end so, in order; all others are counted in ``left_out``."""
    found = []
    for name in files_below(root, left_out):
        if has_ending(name, (ending,)):
            found.append(root / name)
        else:
            left_out.add(f"files that do not end in .{ending}", name)
    return sorted(found)


def splits_of_files(paths: Sequence[Path], base: Path) -> list[str]:
    """The split of each file: train, validation, test, or another one by the hub's name for it, which is not read.

    Args:
        paths: The files.
        base: The folder they lie in; names of folders from there on count, those of the innermost first.

    Raises:
        DataError: If some are called train, and another might be anything.
    """
    said = [_split_named(path.relative_to(base)) for path in paths]
    if TRAIN not in said:
        return [split or TRAIN for split in said]
    found = []
    for path, split in zip(paths, said, strict=True):
        hub = _OF_THE_HUB.fullmatch(path.name)
        if split is None and hub is None:
            raise DataError(
                f"{str(path)!r} lies beside files that are called train, and its name says no split (train, val or "
                "test): rename it, or take it out of the folder."
            )
        found.append(split or (hub[1] if hub else TRAIN))
    return found


def _split_named(path: Path) -> str | None:
    for part in reversed(path.parts):
        words = re.split(r"[^a-z]+", part.lower())
        for split, names in _WORDS.items():
            if any(name in words for name in names):
                return split
    return None


def told_unread(splits: Sequence[str]) -> str:
    """What is said of splits that are there and are not read; empty if there are none."""
    if not splits:
        return ""
    return f"{', '.join(splits)} {'is' if len(splits) == 1 else 'are'} not read"
