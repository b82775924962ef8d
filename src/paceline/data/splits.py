"""Split names: words in folder, file and row names that mark training or held-out data."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import PurePath

TRAIN, VALIDATION, TEST = "train", "validation", "test"
# If a split has several names, the first one is read.
SPLIT_NAMES = {
    TRAIN: ("train", "training"),
    VALIDATION: ("validation", "val", "valid", "dev"),
    TEST: ("test", "testing"),
}
UNREAD_SPLITS = "files of splits that are not read"
"""Reason for which such files are left out."""


def split_of(path: PurePath) -> str | None:
    """Return the split named by the words of a path, innermost part first; None if none is."""
    for part in reversed(path.parts):
        words = re.split(r"[^a-z]+", part.lower())
        for split, names in SPLIT_NAMES.items():
            if not set(names).isdisjoint(words):
                return split
    return None


def held_out_among(names: Collection[str]) -> str | None:
    """Return the name of the evaluation split: validation, or else test; None if neither exists."""
    return next((word for split in (VALIDATION, TEST) for word in SPLIT_NAMES[split] if word in names), None)


def unread_splits(names: Sequence[str]) -> str:
    """Describe splits that exist but are not read; empty if there are none."""
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not read" if names else ""
