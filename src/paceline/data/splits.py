"""Split names: words in folder, file and row names that mark training or held-out data."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path, PurePath
from typing import Protocol, TypeVar

from paceline.errors import data_error
from paceline.parsing.files import is_folder, visible_entries

Sample_co = TypeVar("Sample_co", covariant=True)


class Source(Protocol[Sample_co]):
    """The samples of one split; ids are 0 … len - 1."""

    def __len__(self) -> int: ...

    def read(self, sample: int) -> Sample_co:
        """Return a sample.

        Raises:
            BrokenImageError: If it cannot be read.
        """
        ...

    def path(self, sample: int) -> str:
        """Return the name under which a sample is reported, such as its file."""
        ...


TRAIN, VALIDATION, TEST = "train", "validation", "test"
# If a split has several names, the first one is read.
SPLIT_NAMES = {
    TRAIN: ("train", "training"),
    VALIDATION: ("validation", "val", "valid", "dev"),
    TEST: ("test", "testing"),
}
_PLAIN = ("train", "val", "test")
_FOLDER = re.compile(
    r"(train(?:ing)?|val(?:id(?:ation)?)?|dev|eval(?:uation)?|test(?:ing)?)[ _-]?(?:set|data|images|20\d\d)?"
)
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


def split_folders(root: Path, *, nested: bool = True) -> dict[str, str]:
    """Return the folder of each split, by names in any case; plain names (train, val, test) are preferred.

    Args:
        root: The folder that holds them.
        nested: Whether other than plain names need a folder inside: a class may be called Train.

    Raises:
        DataError: If two names differ in case only.
    """
    found: dict[str, str] = {}
    names = [entry.name for entry in (visible_entries(root) if root.is_dir() else ()) if is_folder(entry)]
    for name in sorted(names, key=lambda each: (each not in _PLAIN, each)):
        word = _FOLDER.fullmatch(name.lower())
        if word is None or (nested and name not in _PLAIN and not any(map(is_folder, visible_entries(root / name)))):
            continue
        first = found.setdefault(split_of(PurePath(word[1])) or VALIDATION, name)  # eval is a name of folders only
        if first != name and first.lower() == name.lower():
            raise data_error(root, f"has {first!r} and {name!r}, two folders of one split: join them.")
    return found


def held_out_among(names: Collection[str]) -> str | None:
    """Return the name of the evaluation split: validation, or else test; None if neither exists."""
    return next((word for split in (VALIDATION, TEST) for word in SPLIT_NAMES[split] if word in names), None)


def unread_splits(names: Sequence[str]) -> str:
    """Describe splits that exist but are not read; empty if there are none."""
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not read" if names else ""
