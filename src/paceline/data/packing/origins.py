"""Sources to be packed: their kind is seen from their files, and their images are opened in their order."""

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
from paceline.data.image.decode import BrokenImageError
from paceline.data.image.mapped import MappedSource
from paceline.data.image.selection import digest_of, first_of_all, take_classes
from paceline.data.image.sets.archives import find_archive, find_mnist, mnist_kind
from paceline.data.image.sets.huggingface import find_files
from paceline.data.image.sets.packed import MANIFEST, UNFINISHED, Origin, PackedPixels, read_manifest
from paceline.data.image.sets.parquet import TableSource
from paceline.data.image.source import ArraySource, FileSource, SampleSource, SubsetSource, encoded_source
from paceline.dataset_registry import find_dataset
from paceline.errors import DataError
from paceline.escaping import utf8
from paceline.files import is_ignored, refuse_odd_kinds
from paceline.recipe.data import Data

_COMPRESSED = frozenset({".gz", ".tgz", ".bz2", ".xz", ".zst"})
_ARCHIVES = {"cifar-100-": "cifar100", "cifar-10-": "cifar10"}  # by what their names begin with

_TOLD = {"train": "training", "validation": "held-out"}  # splits as messages call them
_WEIGHED = 1024
_LOOKED_AT = 16


@dataclass(frozen=True, kw_only=True)
class OriginSplit:
    """One split of a source.

    Attributes:
        source: Its images.
        root: Names of image files are relative to this folder: wherever the source is copied to, they lead somewhere.
    """

    source: SampleSource
    root: str

    def name(self, sample: int) -> str:
        """Name of an image in the packed dataset: as in the file that it lies in, or its path within the source."""
        source = self.source
        if isinstance(source, SubsetSource):
            return replace(self, source=source.base).name(int(source.ids[sample]))
        if isinstance(source, FileSource):
            return os.path.relpath(source.path(sample), self.root)
        if isinstance(source, MappedSource | PackedPixels | TableSource):
            return source.names.text(sample)
        return source.path(sample)

    @property
    def has_files(self) -> bool:
        """Whether its images are encoded."""
        return encoded_source(self.source) is not None


@dataclass(frozen=True, kw_only=True)
class OpenedOrigin:
    """A source, opened.

    Attributes:
        origin: What the packed dataset says of it.
        left_out: What is there and not used, a sentence for each kind.
        classes: Class names.
        channels: What its images would be decoded to for training, 1 or 3.
        splits: ``train``, and ``validation`` if it has such images of its own.
    """

    origin: Origin
    classes: tuple[str, ...]
    channels: Literal[1, 3]
    splits: Mapping[str, OriginSplit]
    left_out: tuple[str, ...] = ()

    @property
    def has_files(self) -> bool:
        """Whether its images are encoded."""
        return self.splits["train"].has_files

    @property
    def total(self) -> int:
        """Number of images."""
        return sum(len(split.source) for split in self.splits.values())


def open_origin(path: str, kind: str | None = None, part: Data | None = None) -> OpenedOrigin:
    """Open a source.

    Args:
        path: A file, a folder, or a pattern of tars.
        kind: What it is, by the name of the data set that opens it; None to look.
        part: Which columns hold what, which classes and how many images to take; None for all.

    Raises:
        DataError: If there is none, or it is not what it should be.
        RecipeError: If what is wanted of it leaves nothing, or a class empty.
    """
    kind, part, root = kind or detect(path), part or Data(), Path(path).expanduser()
    entry = find_dataset(kind)
    for name in ("image_column", "label_column", "split_column"):
        if getattr(part, name) != "auto" and (entry is None or name not in entry.keys):
            raise DataError(f"--{name.replace('_', '-')} has no effect on a source of the kind {kind}: leave it out.")
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
    within = str(root.absolute().parent if kind == "csv" else root)
    opened = OpenedOrigin(
        # A dataset that is packed anew keeps what was packed first.
        origin=replace(read_manifest(root).origin, digest=stored.digest) if kind == "packed" else origin,
        classes=tuple(map(utf8, stored.classes)),
        channels=1 if stored.channels == 1 else 3,
        splits={name: OriginSplit(source=source, root=within) for name, source in sources.items()},
        left_out=stored.left_out,
    )
    if part.only_classes is not None:
        splits = {_TOLD[name]: split.source for name, split in opened.splits.items()}
        names, parts = take_classes(part.only_classes, opened.classes, splits, "--only-classes")
        taken = {name: parts[_TOLD[name]] for name in opened.splits}
        ids = [each.ids for each in parts.values()]
        opened = replace(_with_parts(opened, taken, "only classes", names, *ids), classes=names)
    if part.subset is not None:
        first = first_of_all(opened.splits["train"].source, part.subset, "--subset")
        opened = _with_parts(opened, {"train": first}, "subset", first.ids)
    return opened


def _with_parts(opened: OpenedOrigin, parts: Mapping[str, SubsetSource], *why: object) -> OpenedOrigin:
    """Parts of some splits in place of the whole ones; ``why`` goes into the digest."""
    taken = {name: replace(opened.splits[name], source=part) for name, part in parts.items()}
    origin = replace(opened.origin, digest=digest_of(opened.origin.digest, *why))
    return replace(opened, splits={**opened.splits, **taken}, origin=origin)


def detect(path: str) -> str:
    """Say what kind of source lies there, by the name of the data set that opens it.

    Raises:
        DataError: If nothing does, a file that is none, or folders that may not be read.
    """
    root = Path(path).expanduser()
    try:
        if not root.exists():
            if "{" in path or has_magic(path):
                return "parquet" if path.endswith(".parquet") else "webdataset"
            raise DataError(f"there is no {str(root)!r}: correct the path.")
        if not root.is_dir():
            refuse_odd_kinds(root)
            return _kind_of_file(root)
        return _kind_of_folder(root)
    except PermissionError as error:
        raise DataError(
            f"{error.filename!r} cannot be read ({error.strerror}): give the right to, or name the kind."
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
        raise DataError(f"{str(root)!r} holds compressed files: uncompress them, for tars are read where images lie.")
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
    raise DataError(
        f"{str(path)!r} is a file, and none that can be packed by its name (a .tar of WebDataset, a .parquet, a .csv "
        "or .tsv of paths and labels, cifar-10-*.tar.gz or cifar-100-*.tar.gz): name a folder, or tell `pack` what it "
        "is with --kind."
    )


def _kind_of_tables(path: Path) -> str | None:
    """Hugging Face's, if they say what is an image and what a label; otherwise tables of anyone's; None if neither."""
    found = find_files(path)
    if found is None:
        return None
    kinds = [said.get("_type") for said in found.features.values() if isinstance(said, dict)]
    return "huggingface" if not found.is_parquet or {"Image", "ClassLabel"} <= set(kinds) else "parquet"


def _suffixes(root: Path) -> set[str]:
    """Endings of the files in a folder, and of the first few in each folder in it: a million need not be listed."""
    found = set()
    for entry in root.iterdir():
        if is_ignored(entry.name):
            continue
        if not entry.is_dir():
            found.add(entry.suffix.lower())
            continue
        with os.scandir(entry) as inside:
            seen = (each.name for each in inside if not is_ignored(each.name))
            found |= {Path(name).suffix.lower() for name in islice(seen, _LOOKED_AT)}
    return found


def mean_bytes(opened: OpenedOrigin) -> float:
    """Bytes of an image as the source has it, from up to 1024 of them spread evenly."""
    source = opened.splits["train"].source
    if (pixels := _pixels(source)) is not None:
        return float(pixels.images[0].nbytes)
    chosen = range(0, len(source), max(1, -(-len(source) // _WEIGHED)))
    return float(np.mean([max(1, _length(source, sample)) for sample in chosen]))


def _pixels(source: SampleSource) -> ArraySource | None:
    whole = source.base if isinstance(source, SubsetSource) else source
    return whole if isinstance(whole, ArraySource) else None


def _length(source: SampleSource, sample: int) -> int:
    try:
        if isinstance(source, FileSource):
            return os.stat(source.path(sample)).st_size
        files = encoded_source(source)
        return source.read(sample).nbytes if files is None else len(files.encoded(sample))
    except (OSError, BrokenImageError):
        return 1
