"""Sources to pack: open their images in order."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from paceline.data.image.dataset import DatasetRequest
from paceline.data.image.datasets import open_stored
from paceline.data.image.mapped import MappedSource
from paceline.data.image.selection import digest_of, stratified_subset, take_classes
from paceline.data.image.sets.packed import Origin, PackedPixels, read_manifest
from paceline.data.image.sets.parquet import LARGEST_KEPT, TableSource
from paceline.data.image.source import FileSource, SampleSource, SubsetSource, encoded_source, leaf_sources
from paceline.errors import DataError
from paceline.parsing.plain_text import utf8
from paceline.plugins.dataset_registry import detect_dataset, find_dataset
from paceline.recipe.data import Data

_TOLD = {"train": "training", "validation": "held-out"}  # display names of splits


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
    kind, part, root = kind or detect_dataset(path), part or Data(), Path(path).expanduser()
    entry = find_dataset(kind)
    if entry is not None and not entry.uses("path"):
        raise DataError(f"--kind {kind} is not read from files, so it cannot be packed: leave it out.")
    for name in ("image_column", "label_column", "split_column"):
        if getattr(part, name) != "auto" and (entry is None or not entry.uses(name)):
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
        root=str(root.absolute().parent if root.is_file() else root),
        classes=classes,
        channels=1 if stored.channels == 1 else 3,
        splits=sources,
        left_out=stored.left_out,
    )
