"""Names of splits: the words by which folders, files and rows say that they are for training or held out."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import PurePath

TRAIN, VALIDATION, TEST = "train", "validation", "test"
# The first of several names of a split is the one to read.
WORDS = {
    TRAIN: ("train", "training"),
    VALIDATION: ("validation", "val", "valid", "dev"),
    TEST: ("test", "testing"),
}


def split_of(path: PurePath) -> str | None:
    """Return the split that the words of a path name, those of the innermost part first; None if none does."""
    for part in reversed(path.parts):
        words = re.split(r"[^a-z]+", part.lower())
        for split, names in WORDS.items():
            if not set(names).isdisjoint(words):
                return split
    return None


def held_out_among(names: Collection[str]) -> str | None:
    """Return the name of the split to evaluate on: validation, or else test; None if neither is there."""
    return next((word for split in (VALIDATION, TEST) for word in WORDS[split] if word in names), None)


def unread_splits(names: Sequence[str]) -> str:
    """Report splits that exist but are not read; empty if there are none."""
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not read" if names else ""
