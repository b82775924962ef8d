"""Sources to pack: detect their kind from their files, and open their images in order."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from glob import has_magic
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np

from paceline.data.image.dataset import DatasetRequest
from paceline.data.image.datasets import open_stored
from paceline.data.image.mapped import MappedSource
from paceline.data.image.selection import digest_of, stratified_subset, take_classes
from paceline.data.image.sets.archives import find_archive, find_mnist, mnist_kind
from paceline.data.image.sets.huggingface import find_files
from paceline.data.image.sets.packed import MANIFEST, UNFINISHED, Origin, PackedPixels, read_manifest
from paceline.data.image.sets.parquet import LARGEST_KEPT, TableSource
from paceline.data.image.source import FileSource, SampleSource, SubsetSource, encoded_source, leaf_sources
from paceline.dataset_registry import find_dataset
from paceline.errors import DataError
from paceline.escaping import utf8
from paceline.files import is_ignored, refuse_archive, refuse_special_inputs
from paceline.recipe.data import Data

_COMPRESSED = frozenset({".gz", ".tgz", ".bz2", ".xz", ".zst"})
_ARCHIVES = {"cifar-100-": "cifar100", "cifar-10-": "cifar10"}  # by prefix of their names

_TOLD = {"train": "training", "validation": "held-out"}  # display names of splits
_LOOKED_AT = 16


@dataclass(frozen=True, kw_only=True)
class OpenedOrigin:
    """An opened source.

    Attributes:
        origin: Its description in the packed dataset.
        root: Image file names are relative to this folder, so that they stay valid in a copy of the source.
        classes: Class names.
        channels: Channels to which its images would be decoded for training, 1 or 3.
        splits: ``train``, and ``validation`` if the source has this split.
        left_out: Unused data, one sentence per kind.
    """

    origin: Origin
    root: str
    classes: tuple[str, ...]
    channels: Literal[1, 3]
    splits: Mapping[str, SampleSource]
    left_out: tuple[str, ...] = ()

    @property
    def has_files(self) -> bool:
        """Whether its images are encoded files."""
        return encoded_source(self.splits["train"]) is not None

    @property
    def total(self) -> int:
        """Number of images."""
        return sum(map(len, self.splits.values()))

    @property
    def readers(self) -> int:
        """Maximum number of reading threads: the row groups that they read must fit into the cache together."""
        leaves = [leaf for split in self.splits.values() for leaf, _ in leaf_sources(split, np.arange(0))]
        tables = [each for each in leaves if isinstance(each, TableSource) and not each.is_mapped]
        return max(1, LARGEST_KEPT // max([group.size for each in tables for group in each.groups], default=1))

    def name(self, source: SampleSource, sample: int) -> str:
        """Return an image's name in the packed dataset: as in its container file, or its path within the source."""
        if isinstance(source, SubsetSource):
            return self.name(source.base, int(source.ids[sample]))
        if isinstance(source, FileSource):
            return os.path.relpath(source.path(sample), self.root)
        if isinstance(source, MappedSource | PackedPixels | TableSource):
            return source.names.text(sample)
        return source.path(sample)


def open_origin(path: str, kind: str | None = None, part: Data | None = None) -> OpenedOrigin:
    """Open a source.

    Args:
        path: A file, a folder, or a pattern of tars.
        kind: Kind of source, by the name of the data set that opens it; None to detect it.
        part: Columns, classes and number of images to use; None for all.

    Raises:
        DataError: If it does not exist, or is of another kind.
        RecipeError: If the selection is empty, or leaves a class empty.
    """
    kind, part, root = kind or detect(path), part or Data(), Path(path).expanduser()
    entry = find_dataset(kind)
    for name in ("image_column", "label_column", "split_column"):
        if getattr(part, name) != "auto" and (entry is None or name not in entry.keys):
            raise DataError(f"--{name.replace('_', '-')} has no effect with --kind {kind}: leave it out.")
    data = replace(part, dataset=kind, path=path, validation_fraction=0)
    stored = open_stored(DatasetRequest(data=data, in_any_order=False, tries_files=False))
    sources: dict[str, SampleSource] = {"train": stored.train, "validation": stored.validation}
    if stored.is_split_off:
        assert isinstance(stored.train, SubsetSource)
        sources = {"train": stored.train.base}
    known = stored.statistics
    origin = Origin(
        kind=kind,
        digest=stored.digest,
        held_out="" if stored.is_split_off else stored.split,
        mean=None if known is None else known.mean,
        std=None if known is None else known.std,
    )
    if kind == "packed":  # when a packed dataset is packed again, the original origin is kept
        origin = replace(read_manifest(root).origin, digest=stored.digest)
    classes = tuple(map(utf8, stored.classes))
    if part.only_classes is not None:
        named_sources = {_TOLD[name]: source for name, source in sources.items()}
        classes, description = take_classes(part.only_classes, classes, named_sources, "--only-classes")
        sources = {name: description[_TOLD[name]] for name in sources}
        ids = [each.ids for each in description.values()]
        origin = replace(origin, digest=digest_of(origin.digest, "only classes", classes, *ids))
    if part.subset is not None:
        first = stratified_subset(sources["train"], part.subset, "--subset")
        sources["train"] = first
        origin = replace(origin, digest=digest_of(origin.digest, "subset", first.ids))
    return OpenedOrigin(
        origin=origin,
        root=str(root.absolute().parent if kind == "csv" else root),
        classes=classes,
        channels=1 if stored.channels == 1 else 3,
        splits=sources,
        left_out=stored.left_out,
    )


def detect(path: str) -> str:
    """Detect the kind of a source, by the name of the data set that opens it.

    Raises:
        DataError: If the path does not exist, is of an unknown kind, or has unreadable folders.
    """
    root = Path(path).expanduser()
    try:
        if not root.exists():
            if "{" in path or has_magic(path):
                return "parquet" if path.endswith(".parquet") else "webdataset"
            raise DataError(f"there is no {str(root)!r}: correct the path.")
        if not root.is_dir():
            refuse_special_inputs(root)
            return _kind_of_file(root)
        return _kind_of_folder(root)
    except PermissionError as error:
        raise DataError(
            f"{error.filename!r} cannot be read ({error.strerror}): give this user read permission, or name the kind."
        ) from None


def _kind_of_folder(root: Path) -> str:
    if (root / MANIFEST).is_file() or (root / UNFINISHED).is_dir():
        return "packed"
    for kind in ("cifar10", "cifar100"):
        if find_archive(root, kind) is not None:
            return kind
    if (folder := find_mnist(root)) is not None:
        return mnist_kind(folder)
    suffixes = _suffixes(root)
    if (".json" in suffixes or ".parquet" in suffixes) and (tables := _kind_of_tables(root)) is not None:
        return tables
    if suffixes & _COMPRESSED and ".tar" not in suffixes and not any(each.is_dir() for each in root.iterdir()):
        raise DataError(
            f"{str(root)!r} holds compressed files: decompress them, because images are read in place from tars."
        )
    return "webdataset" if ".tar" in suffixes else "image_folder"


def _kind_of_file(path: Path) -> str:
    for start, kind in _ARCHIVES.items():
        if path.name.startswith(start):
            return kind
    ending = path.suffix.lower()
    if ending in (".csv", ".tsv"):
        return "csv"
    if ending == ".tar":
        return "webdataset"
    if ending == ".parquet" and (found := _kind_of_tables(path)) is not None:
        return found
    refuse_archive(path)
    raise DataError(
        f"{str(path)!r} is a file whose name does not tell how to pack it (a .tar of WebDataset, a .parquet, a .csv "
        "or .tsv of paths and labels, cifar-10-*.tar.gz or cifar-100-*.tar.gz): name a folder, or tell `pack` what it "
        "is with --kind."
    )


def _kind_of_tables(path: Path) -> str | None:
    """Return Hugging Face's kind if the metadata name image and label, otherwise a generic table; None if neither."""
    found = find_files(path)
    if found is None:
        return None
    kinds = [feature.get("_type") for feature in found.features.values() if isinstance(feature, dict)]
    return "huggingface" if not found.is_parquet or {"Image", "ClassLabel"} <= set(kinds) else "parquet"


def _suffixes(root: Path) -> set[str]:
    """Return the extensions of files in a folder, and of the first few in each subfolder, without listing millions."""
    suffixes = set()
    for entry in root.iterdir():
        if is_ignored(entry.name):
            continue
        if not entry.is_dir():
            suffixes.add(entry.suffix.lower())
            continue
        with os.scandir(entry) as inside:
            seen = (each.name for each in inside if not is_ignored(each.name))
            suffixes |= {Path(name).suffix.lower() for name in islice(seen, _LOOKED_AT)}
    return suffixes
