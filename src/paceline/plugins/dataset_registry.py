"""Registry of data sets of all kinds, both built in and from installed packages, by name.

A data set is one function decorated with :func:`dataset`, in its own file. Built-in ones are in ``sets`` folders, such
as ``paceline/data/image/sets``; another package names its function in the entry points ``paceline.datasets``, or a
package of several in ``paceline.dataset_packages``. Every
command asks this registry what a name or a file means. A recipe's keys are checked against those that a data set
declares, so these files must not import torch, directly or indirectly.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from glob import has_magic
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from paceline.errors import DataError, data_error, did_you_mean
from paceline.parsing.files import is_ignored, refuse_archive, refuse_special_inputs
from paceline.plugins.references import call_reference, is_ours, is_reference, load_reference
from paceline.plugins.registry import built_in, installed, load

_FAMILY = ":NAME"
_LOOKED_AT = 16  # files of each subfolder

Opener = Callable[[Any], Any]
"""Opens a data set: of images from a ``paceline.data.image.dataset.DatasetRequest``, of others from ``recipe.data``."""
AnyOpener = TypeVar("AnyOpener", bound=Opener)
Pictures = Callable[[Any], tuple[Any, tuple[str, ...]]]
_T = TypeVar("_T")


class Size(NamedTuple):
    """Typical size of a data set, used to estimate a run without its files."""

    name: str
    samples: int
    classes: int
    image_size: int


class StandIn(NamedTuple):
    """Generated data in place of a data set whose path is not given.

    Attributes:
        assume: Returns its ``data`` section, and a sentence that says what is assumed.
        is_plannable: Whether `train --plan-only` takes it, too.
    """

    assume: Callable[[Any], tuple[Any, str]]
    is_plannable: bool = False


class PictureHooks(NamedTuple):
    """What commands ask of a data set of annotated pictures; both are described in :class:`DatasetEntry`."""

    pictures: Pictures | None
    first_recipe: str = ""


class Place:
    """A file, folder or pattern of which the data set is looked for.

    Attributes:
        path: The path.
        is_folder: Whether it is a folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.is_folder = self.path.is_dir()

    @cached_property
    def endings(self) -> frozenset[str]:
        """Endings of a folder's files, and of the first few in each subfolder, without listing millions."""
        endings = set()
        for entry in self.path.iterdir() if self.is_folder else ():
            if is_ignored(entry.name):
                continue
            if not entry.is_dir():
                endings.add(entry.suffix.lower())
                continue
            with os.scandir(entry) as inside:
                seen = (each.name for each in inside if not is_ignored(each.name))
                endings |= {os.path.splitext(name)[1].lower() for name in islice(seen, _LOOKED_AT)}
        return frozenset(endings)


@dataclass(frozen=True)
class DatasetEntry:
    """A data set that a recipe can name.

    Attributes:
        name: Its name; ``library:NAME`` stands for all names that begin with ``library:``.
        kind: The kind of its samples, as a noun, such as ``images``; None if the function that opens it is undecorated.
        open: Function that opens it.
        keys: Keys of a recipe's ``data`` section that have an effect on it and not on every data set; None: all.
        endings: Endings of its files' names, in lower case.
        sniff: Whether a folder, or a file with one of these endings, is such a data set; None: every such file is.
        size: Its typical size; None if unknown.
        stand_in: Generated data like it, for estimates without its files; None if there is none.
        pictures: If samples are annotated pictures: returns those of a recipe as an ``ImageDataset`` with any number of
            labels, for `paceline check-data`, and a sentence for each kind of implausible annotation.
        first_recipe: ``module:function`` that chooses a recipe for a folder of annotated pictures, given the data set's
            name, the folder and the user's overrides; empty if there is none.
    """

    name: str
    kind: str | None
    open: Opener
    keys: frozenset[str] | None
    endings: tuple[str, ...] = ()
    sniff: Callable[[Place], object] | None = None
    size: Size | None = None
    stand_in: StandIn | None = None
    pictures: Pictures | None = None
    first_recipe: str = ""

    def uses(self, key: str) -> bool:
        """Whether a key of the ``data`` section has an effect on it."""
        return self.keys is None or key in self.keys

    def reads(self, place: Place) -> bool:
        """Whether a file, folder or pattern is such a data set."""
        if not place.is_folder and not place.path.name.lower().endswith(self.endings):
            return False
        with suppress(PermissionError):  # the function that opens it reports the reason
            return not place.is_folder if self.sniff is None else bool(self.sniff(place))
        return False


_entries: dict[tuple[str, str | None], DatasetEntry] = {}


def dataset(
    name: str,
    *,
    kind: str = "images",
    endings: Sequence[str] = (),
    sniff: Callable[[Place], object] | None = None,
    keys: Sequence[str] = (),
    size: Size | None = None,
    stand_in: StandIn | None = None,
    pictures: Pictures | PictureHooks | None = None,
) -> Callable[[AnyOpener], AnyOpener]:
    """Register the decorated function under a name; a name may stand for data sets of several kinds.

    The arguments are described in :class:`DatasetEntry`.
    """

    hooks = pictures if isinstance(pictures, PictureHooks) else PictureHooks(pictures)

    def register(opener: AnyOpener) -> AnyOpener:
        _entries[name, kind] = DatasetEntry(
            name, kind, opener, frozenset(keys), tuple(endings), sniff, size, stand_in, *hooks
        )
        return opener

    return register


def entries(kind: str | None = None) -> list[DatasetEntry]:
    """Return the registered data sets, of one kind or of all; those of other packages once these are imported."""
    for package in _packages():
        _load(package)
    found = [each for each in _entries.values() if kind in (None, each.kind)]
    # Their order is that of the files, whichever of them were imported first.
    return sorted(found, key=lambda each: getattr(each.open, "__module__", ""))


def dataset_names(kind: str | None = None) -> tuple[str, ...]:
    """Return the names of all data sets: built-in ones first, then those of other packages, without imports."""
    others = {each.name for each in entries() if kind not in (None, each.kind)}
    named = sorted({each.name for each in entries(kind)})
    return tuple(dict.fromkeys((*named, *(name for name in installed("datasets") if name not in others))))


def find_dataset(name: str, kind: str = "images") -> DatasetEntry | None:
    """Return the data set of that name and kind, or None; imports the package that provides it."""
    return next((each for each in named(name) if each.kind in (kind, None)), None)


def named(name: str) -> list[DatasetEntry]:
    """Return the data sets of that name, of every kind; a built-in name is of one package."""
    names = (name, name.partition(":")[0] + _FAMILY)
    for package in _packages():
        _load(package, name)
        if found := [each for each in _entries.values() if each.name in names]:
            return found
    if name not in installed("datasets"):
        return []
    opener = load_reference(installed("datasets")[name], DataError, installed=True)
    if not (found := [each for each in _entries.values() if each.name == name]):
        found = [_entries.setdefault((name, None), DatasetEntry(name, None, opener, None))]
    return found


def dataset_at(path: str | Path) -> DatasetEntry | None:
    """Return the data set of images of a file, folder or pattern, or None.

    Other packages are imported only if no built-in data set claims it. A folder that none claims is one of class
    folders.

    Raises:
        DataError: If none claims a file, and another package cannot be imported.
    """
    place, broken = Place(path), ""
    for names in ((), installed("datasets")):
        for name in names:
            try:
                named(name)
            except Exception as error:  # noqa: BLE001  # another package may fail in any way
                broken = f"the installed data set {name!r} cannot be imported ({type(error).__name__}: {error})"
        if (found := next((each for each in entries("images") if each.reads(place)), None)) is not None:
            return found
    if place.is_folder:
        return find_dataset("image_folder")
    if broken:
        raise DataError(f"no data set that can be imported reads {str(path)!r}, and {broken}: repair its package.")
    return None


def annotated_at(path: str | Path) -> list[DatasetEntry]:
    """Return the data sets of annotated pictures that a folder may be, the likeliest first."""
    place = Place(path)
    return [each for each in entries() if each.first_recipe and each.reads(place)]


def open_registered(name: str, kinds: Mapping[str, type[_T]], argument: Any) -> _T:
    """Open a data set: registered, or custom code.

    Args:
        name: The recipe's ``data.dataset``.
        kinds: The kinds that the task takes, and the class of such data sets.
        argument: What the function that opens it is called with.

    Raises:
        DataError: If there is no such data set, or the function that opens it returns something else.
    """
    if is_reference(name):
        opener = load("datasets", name, DataError)
    elif entry := next(filter(None, map(partial(find_dataset, name), kinds)), None):
        opener = entry.open
    else:
        names = sorted({each for kind in kinds for each in dataset_names(kind)})
        others = [str(each.kind) for each in named(name)]
        found = f", a data set of {' and of '.join(others)}, not of {' or '.join(kinds)}" if others else ""
        raise DataError(
            f"data.dataset is {name!r}{found}; known are {', '.join(names)} and 'package.module:factory'."
            f"{did_you_mean(name, names)}"
        )
    opened = call_reference("data.dataset", name, opener, DataError, argument)
    for each in kinds.values():
        if isinstance(opened, each):
            return opened
    expected = " or ".join(f"{each.__module__}.{each.__name__}" for each in kinds.values())
    raise DataError(f"data.dataset={name}: its opener returned {type(opened).__name__}; it must return a {expected}.")


def detect_dataset(path: str) -> str:
    """Return the name of the data set that opens a source of images.

    Raises:
        DataError: If the path does not exist, or its files tell no data set.
    """
    root = Path(path).expanduser()
    if not root.exists() and "{" not in path and not has_magic(path):
        raise DataError(f"there is no {str(root)!r}: correct the path.")
    if (entry := dataset_at(root)) is not None:
        return entry.name
    if not root.exists():
        return "webdataset"
    refuse_special_inputs(root)
    refuse_archive(root)
    endings = ", ".join(dict.fromkeys(ending for each in entries("images") for ending in each.endings))
    raise data_error(
        path,
        f"is a file whose name does not tell what it holds (known: {endings}): name a folder, or give the data set, "
        "with data.dataset or with `pack --kind`.",
    )


@cache
def _packages() -> tuple[str, ...]:
    """Return the packages of data sets, that of images first."""
    return tuple((built_in("dataset_packages") | installed("dataset_packages")).values())


@cache
def _load(package: str, name: str = "") -> None:
    """Import the file of a data set's name, or if there is none, all of the package."""
    try:
        files = [each.name for each in pkgutil.iter_modules(importlib.import_module(package).__path__)]
        for each in [name] if name in files else files:
            importlib.import_module(f"{package}.{each}")
    except Exception as error:  # another package may fail in any way, which must not stop the others
        if is_ours(package):
            raise
        warnings.warn(f"the data sets of the installed package {package} cannot be imported: {error}", stacklevel=2)


class DatasetNames(Collection[str]):
    """Names of the data sets that a key applies to, or of all; looked up on first use."""

    def __init__(self, key: str | None = None) -> None:
        """Store the key."""
        self._key = key

    @property
    def _names(self) -> tuple[str, ...]:
        if self._key is None:
            return dataset_names()
        return tuple(sorted({each.name for each in entries() if each.keys is not None and self._key in each.keys}))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and any(self._key is None or each.uses(self._key) for each in named(name))

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)
