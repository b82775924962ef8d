"""What is the source that is to be packed? Its kind is seen from its files, and its images are opened."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from glob import has_magic
from itertools import islice
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from paceline.data.image import cifar, cifar100, mnist
from paceline.data.image.decode import BrokenImageError
from paceline.data.image.folder import ImageFolder, open_image_folder
from paceline.data.image.huggingface import choose_columns, choose_splits, find_files, open_huggingface
from paceline.data.image.mapped import MappedSource, Names, StoredImages, probe
from paceline.data.image.packed import PackedPixels, open_packed, packed_images
from paceline.data.image.packed_layout import MANIFEST, UNFINISHED, Origin
from paceline.data.image.pixels import array_digest
from paceline.data.image.source import ArraySource, FileSource, SampleSource, SubsetSource, encoded_source
from paceline.data.image.webdataset import open_webdataset
from paceline.data.packing.parquet import ParquetSource
from paceline.errors import DataError

Kind = Literal["image_folder", "webdataset", "huggingface", "cifar10", "cifar100", "mnist", "fashion_mnist", "packed"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_COMPRESSED = frozenset({".gz", ".tgz", ".bz2", ".xz", ".zst"})
_ARCHIVES: dict[str, Kind] = {"cifar-100-": "cifar100", "cifar-10-": "cifar10"}  # by what their names begin with

_WEIGHED = 1024
_LOOKED_AT = 16


@dataclass(frozen=True)
class RelativeName:
    """Names image files by their paths within the source, which lead anywhere the source is copied to."""

    source: FileSource
    root: str

    def __call__(self, sample: int) -> str:
        """Return the file's path within the source."""
        return os.path.relpath(self.source.path(sample), self.root)


@dataclass(frozen=True)
class InnerName:
    """Names images by what the file that they lie in calls them."""

    names: Names

    def __call__(self, sample: int) -> str:
        """Return the image's name within its file."""
        return self.names[sample]


@dataclass(frozen=True, kw_only=True)
class OriginSplit:
    """One split of a source.

    Attributes:
        source: Its images.
        name: What each of them is called in the packed dataset.
    """

    source: SampleSource
    name: Callable[[int], str]

    @property
    def has_files(self) -> bool:
        """Whether its images are encoded."""
        return encoded_source(self.source) is not None


@dataclass(frozen=True, kw_only=True)
class OpenedOrigin:
    """A source, opened.

    Attributes:
        origin: What the packed dataset says of it.
        classes: Class names.
        channels: What its images would be decoded to for training, 1 or 3.
        splits: ``train``, and ``validation`` if it has such images of its own.
    """

    origin: Origin
    classes: tuple[str, ...]
    channels: Literal[1, 3]
    splits: Mapping[str, OriginSplit]

    @property
    def has_files(self) -> bool:
        """Whether its images are encoded."""
        return self.splits["train"].has_files

    @property
    def total(self) -> int:
        """Number of images."""
        return sum(len(split.source) for split in self.splits.values())


def open_origin(path: str, kind: Kind | None = None, *, label_column: str = "auto") -> OpenedOrigin:
    """Open a source.

    Args:
        path: A file, a folder, or a pattern of tars.
        kind: What it is; None to look.
        label_column: Which column of a Hugging Face dataset holds the labels.

    Raises:
        DataError: If there is none, or it is not what it should be.
    """
    kind = kind or detect(path)
    root = Path(path).expanduser()
    if label_column != "auto" and kind != "huggingface":
        raise DataError(f"--label-column has no effect on a source of the kind {kind}: leave it out.")
    match kind:
        case "cifar10" | "cifar100" | "mnist" | "fashion_mnist":
            return _open_archive(root, kind)
        case "huggingface":
            return _open_huggingface(root, label_column)
        case "webdataset":
            return _of_images(kind, open_webdataset(path, channels=None, validation_fraction=0), str(root))
        case "packed":
            return _open_packed(root)
    return _of_images(kind, open_image_folder(root, channels=None, validation_fraction=0), str(root))


def detect(path: str) -> Kind:
    """Say what kind of source lies there.

    Raises:
        DataError: If nothing does, a file that is none, or folders that may not be read.
    """
    try:
        return _detected(path)
    except PermissionError as error:
        raise DataError(
            f"{error.filename!r} cannot be read ({error.strerror}): give the right to, or name the kind."
        ) from None


def _detected(path: str) -> Kind:
    root = Path(path).expanduser()
    if not root.exists():
        if "{" in path or has_magic(path):
            if path.endswith(".parquet"):
                raise DataError(f"{path!r} is a pattern of parquet files: name the folder that they are in.")
            return "webdataset"
        raise DataError(f"there is no {str(root)!r}: correct the path.")
    if root.is_file():
        return _kind_of_file(root)
    if (root / MANIFEST).is_file() or (root / UNFINISHED).is_dir():
        return "packed"
    if cifar.find_cifar_archive(root) is not None:
        return "cifar10"
    if cifar100.find_cifar100_archive(root) is not None:
        return "cifar100"
    if (folder := mnist.find_mnist_folder(root)) is not None:
        return "fashion_mnist" if mnist.is_fashion(folder) else "mnist"
    return _kind_of_folder(root)


def _kind_of_folder(root: Path) -> Kind:
    suffixes = _suffixes(root)
    if (".json" in suffixes or ".parquet" in suffixes) and find_files(root) is not None:
        return "huggingface"
    if suffixes & _COMPRESSED and ".tar" not in suffixes and not any(each.is_dir() for each in root.iterdir()):
        raise DataError(f"{str(root)!r} holds compressed files: uncompress them, for tars are read where images lie.")
    return "webdataset" if ".tar" in suffixes else "image_folder"


def _kind_of_file(path: Path) -> Kind:
    for start, kind in _ARCHIVES.items():
        if path.name.startswith(start):
            return kind
    if path.suffix in (".tar", ".parquet"):
        return "webdataset" if path.suffix == ".tar" else "huggingface"
    raise DataError(
        f"{str(path)!r} is a file, and none that can be packed by its name (a .tar of WebDataset, a .parquet of "
        "Hugging Face, cifar-10-*.tar.gz or cifar-100-*.tar.gz): name a folder, or tell `pack` what it is with --kind."
    )


def _suffixes(root: Path) -> set[str]:
    """Endings of the files in a folder, and of the first few in each folder in it: a million need not be listed."""
    found = set()
    for entry in root.iterdir():
        if not entry.is_dir():
            found.add(entry.suffix)
            continue
        with os.scandir(entry) as inside:
            found |= {Path(each.name).suffix for each in islice(inside, _LOOKED_AT)}
    return found


def _of_images(kind: Kind, opened: ImageFolder | StoredImages, root: str) -> OpenedOrigin:
    """A source that is opened for training in the same way."""
    sources: dict[str, SampleSource] = {"train": opened.train, "validation": opened.validation}
    if opened.is_split_off:
        assert isinstance(opened.train, SubsetSource)
        sources = {"train": opened.train.base}
    return OpenedOrigin(
        origin=Origin(kind=kind, digest=opened.digest, held_out="" if opened.is_split_off else opened.split),
        classes=opened.classes,
        channels=1 if opened.channels == 1 else 3,
        splits={name: _split(source, root) for name, source in sources.items()},
    )


def _split(source: SampleSource, root: str) -> OriginSplit:
    if isinstance(source, FileSource):
        return OriginSplit(source=source, name=RelativeName(source, root))
    if isinstance(source, MappedSource | PackedPixels | ParquetSource):
        return OriginSplit(source=source, name=InnerName(source.names))
    return OriginSplit(source=source, name=source.path)


def _open_huggingface(root: Path, label_column: str) -> OpenedOrigin:
    files = find_files(root)
    if files is None or not files.is_parquet:
        opened = open_huggingface(root, channels=None, validation_fraction=0, label_column=label_column)
        return _of_images("huggingface", opened, str(root))
    columns = choose_columns(files, label_column)
    train_name, held_out_name, held_out = choose_splits(files)
    sources = {"train": ParquetSource(files, columns, train_name)}
    if held_out_name is not None:
        sources["validation"] = ParquetSource(files, columns, held_out_name)
    return OpenedOrigin(
        origin=Origin(
            kind="huggingface", digest="+".join(each.digest() for each in sources.values()), held_out=held_out
        ),
        classes=columns.classes,
        channels=1 if probe(sources["train"]).greyscale else 3,
        splits={name: _split(source, str(root)) for name, source in sources.items()},
    )


def _open_packed(root: Path) -> OpenedOrigin:
    manifest = open_packed(root).manifest
    opened, _ = packed_images(root, channels=manifest.form.channels, validation_fraction=0)
    found = _of_images("packed", opened, str(root))
    return replace(
        found,
        origin=replace(manifest.origin, digest=manifest.digest),
    )


def _open_archive(root: Path, kind: Literal["cifar10", "cifar100", "mnist", "fashion_mnist"]) -> OpenedOrigin:
    find = {"cifar10": cifar.find_cifar_archive, "cifar100": cifar100.find_cifar100_archive}
    archive = find.get(kind, mnist.find_mnist_folder)(root)
    if archive is None:
        raise DataError(f"{str(root)!r} holds no files of {kind}: correct the path, or leave --kind out.")
    classes: tuple[str, ...]
    if kind == "cifar10":
        train, test = cifar.read_cifar10(archive)
        classes, mean, std = cifar.CLASSES, cifar.MEAN[3], cifar.STD[3]
    elif kind == "cifar100":
        train, test, classes = cifar100.read_cifar100(archive)
        mean, std = cifar100.MEAN, cifar100.STD
    else:
        train, test = mnist.read_mnist(archive)
        classes = mnist.FASHION if kind == "fashion_mnist" else mnist.DIGITS
        mean, std = mnist.MEAN[kind], mnist.STD[kind]
    return OpenedOrigin(
        origin=Origin(
            kind=kind,
            digest=array_digest(train, test),
            held_out="the archive's test images",
            mean=mean,
            std=std,
        ),
        classes=classes,
        channels=1 if train.images.shape[-1] == 1 else 3,
        splits={
            "train": OriginSplit(source=train, name=train.path),
            "validation": OriginSplit(source=test, name=test.path),
        },
    )


def mean_bytes(opened: OpenedOrigin) -> float:
    """Bytes of an image as the source has it, from up to 1024 of them spread evenly."""
    source = opened.splits["train"].source
    if isinstance(source, ArraySource):
        return float(source.images[0].nbytes)
    chosen = range(0, len(source), max(1, -(-len(source) // _WEIGHED)))
    return float(np.mean([max(1, _length(source, sample)) for sample in chosen]))


def _length(source: SampleSource, sample: int) -> int:
    try:
        if isinstance(source, FileSource):
            return os.stat(source.path(sample)).st_size
        files = encoded_source(source)
        return source.read(sample).nbytes if files is None else len(files.encoded(sample))
    except (OSError, BrokenImageError):
        return 1
