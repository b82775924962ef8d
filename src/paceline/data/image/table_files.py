"""Which split is a file of a table of, by its name? The words are those that a column of splits may say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from paceline.data.image.columns import HELD_OUT_WORDS, TRAIN_WORDS
from paceline.errors import DataError
from paceline.files import LeftOut, files_below, has_ending

TRAIN, VALIDATION, TEST = "train", "validation", "test"
_WORDS = {TRAIN: TRAIN_WORDS, VALIDATION: HELD_OUT_WORDS[0], TEST: HELD_OUT_WORDS[1]}
# As the hub names the pieces of a split.
_OF_THE_HUB = re.compile(r"(.+)-\d{5}-of-\d{5}(-[0-9a-f]+)?\.parquet")


def files_ending_in(ending: str, root: Path, left_out: LeftOut) -> list[Path]:
    """The files below a folder that end so, in order; ``left_out`` is told of all others."""
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
    said = [_said(path.relative_to(base)) for path in paths]
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


def told_unread(splits: Sequence[str]) -> str:
    """What is said of splits that are there and are not read; empty if there are none."""
    if not splits:
        return ""
    return f"{', '.join(splits)} {'is' if len(splits) == 1 else 'are'} not read"


def _said(path: Path) -> str | None:
    for part in reversed(path.parts):
        words = re.split(r"[^a-z]+", part.lower())
        for split, names in _WORDS.items():
            if any(name in words for name in names):
                return split
    return None
