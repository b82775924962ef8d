"""Registry of image data sets, both built in and from installed packages, by name.

A data set is one function decorated with :func:`dataset`, in its own file. Built-in ones are in
``paceline/data/image/sets``; another package names its function in the entry points ``paceline.datasets``. A recipe's
keys are checked against those that a data set declares, so these files must not import torch, directly or indirectly.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

from paceline.errors import DataError
from paceline.references import load_reference
from paceline.registry import installed

_BUILTIN_PACKAGE = "paceline.data.image.sets"
_FAMILY = ":NAME"

Opener = Callable[[Any], Any]
"""Takes a ``DatasetRequest`` and returns ``StoredImages``, both of ``paceline.data.image.dataset``."""
AnyOpener = TypeVar("AnyOpener", bound=Opener)


class Size(NamedTuple):
    """Typical size of a data set, used to estimate a run without its files."""

    name: str
    samples: int
    classes: int
    image_size: int


@dataclass(frozen=True, kw_only=True)
class DatasetEntry:
    """A data set that a recipe can name.

    Attributes:
        name: Its name; ``library:NAME`` stands for all names that begin with ``library:``.
        open: Function that opens it.
        keys: Keys of a recipe's ``data`` section that have an effect on it and not on every data set.
        size: Its typical size; None if unknown.
    """

    name: str
    open: Opener
    keys: frozenset[str]
    size: Size | None = None


_entries: dict[str, DatasetEntry] = {}


def dataset(name: str, *, keys: Sequence[str] = (), size: Size | None = None) -> Callable[[AnyOpener], AnyOpener]:
    """Register the decorated function under a name."""

    def register(opener: AnyOpener) -> AnyOpener:
        _entries[name] = DatasetEntry(name=name, open=opener, keys=frozenset(keys), size=size)
        return opener

    return register


def dataset_names() -> tuple[str, ...]:
    """Return the names of all data sets: built-in ones first, then those of other packages, without imports."""
    _load_builtin()
    return tuple(dict.fromkeys((*sorted(_entries), *installed("datasets"))))


def find_dataset(name: str) -> DatasetEntry | None:
    """Return the data set of that name, or None; imports the package that provides it."""
    _load_builtin()
    family = name.partition(":")[0] + _FAMILY
    if name not in _entries and family not in _entries and name in installed("datasets"):
        entry = load_reference(installed("datasets")[name], DataError, installed=True)
        if name not in _entries:  # an undecorated function
            dataset(name, keys=("path", "options"))(entry)
    return _entries.get(name) or _entries.get(family)


@cache
def _load_builtin() -> None:
    for module in pkgutil.iter_modules(importlib.import_module(_BUILTIN_PACKAGE).__path__, f"{_BUILTIN_PACKAGE}."):
        importlib.import_module(module.name)


class DatasetsUsing(Collection[str]):
    """Names of the data sets that a key applies to; looked up on first use."""

    def __init__(self, key: str, *extra_names: str) -> None:
        """Store the key, and names of data sets that are not in the registry."""
        self._key = key
        self._extra_names = extra_names

    @property
    def _names(self) -> tuple[str, ...]:
        _load_builtin()
        return (*sorted(name for name, each in _entries.items() if self._key in each.keys), *self._extra_names)

    def __contains__(self, name: object) -> bool:
        if name in self._extra_names:
            return True
        entry = find_dataset(name) if isinstance(name, str) else None
        return entry is not None and self._key in entry.keys

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)
