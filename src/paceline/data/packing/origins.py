"""What is the source that is to be packed? Its kind is seen from its files, and its images are opened."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from glob import has_magic
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from paceline.data.image import cifar, cifar100, mnist
from paceline.data.image.archives import ArchiveName, find_archive, read_archive
from paceline.data.image.columns import Asked
from paceline.data.image.decode import BrokenImageError
from paceline.data.image.folder import ImageFolder, open_image_folder
from paceline.data.image.huggingface import HuggingFaceFiles, find_files, open_huggingface
from paceline.data.image.manifest import open_csv
from paceline.data.image.mapped import MappedSource, Names, StoredImages
from paceline.data.image.packed import PackedPixels, open_packed, packed_images
from paceline.data.image.packed_layout import MANIFEST, UNFINISHED, Origin
from paceline.data.image.parquet import open_parquet
from paceline.data.image.parquet_source import ParquetSource
from paceline.data.image.pixels import array_digest
from paceline.data.image.selection import choose_classes, digest_of, first_of_all, of_classes
from paceline.data.image.source import ArraySource, FileSource, Ids, SampleSource, SubsetSource, encoded_source
from paceline.data.image.webdataset import open_webdataset
from paceline.errors import DataError
from paceline.escaping import utf8
from paceline.files import is_ignored, refuse_odd_kinds
from paceline.recipe.data import check_part

Kind = Literal[
    "image_folder",
    "csv",
    "parquet",
    "webdataset",
    "huggingface",
    "cifar10",
    "cifar100",
    "mnist",
    "fashion_mnist",
    "packed",
]
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


@dataclass(frozen=True)
class PartName:
    """Names the images of a part of a source as the source names them."""

    name: Callable[[int], str]
    ids: Ids

    def __call__(self, sample: int) -> str:
        """Return the name within the source."""
        return self.name(int(self.ids[sample]))


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


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What of a source is to be packed.

    Attributes:
        columns: Which columns of a table hold what.
        only_classes: Names or numbers of the classes; None for all.
        subset: How many of the training images, or which share of them; None for all.
    """

    columns: Asked = field(default_factory=Asked)
    only_classes: tuple[int | str, ...] | None = None
    subset: int | str | None = None


def wanted_part(
    *,
    image_column: str,
    label_column: str,
    split_column: str,
    only_classes: tuple[str, ...] | None,
    subset: str | None,
) -> Wanted:
    """What of a source is to be packed, as a command line says it.

    Raises:
        DataError: If the subset is neither a number nor a share.
    """
    columns = Asked(image=image_column, label=label_column, split=None if split_column == "off" else split_column)
    part: int | str | None = int(subset) if subset is not None and subset.isdecimal() else subset
    try:
        return Wanted(columns=columns, only_classes=only_classes, subset=None if part is None else check_part(part))
    except ValueError as error:
        raise DataError(f"--subset: {error}.") from None


def open_origin(path: str, kind: Kind | None = None, part: Wanted | None = None) -> OpenedOrigin:
    """Open a source.

    Args:
        path: A file, a folder, or a pattern of tars.
        kind: What it is; None to look.
        part: What of it; None for all.

    Raises:
        DataError: If there is none, or it is not what it should be.
        RecipeError: If what is wanted of it leaves nothing, or a class empty.
    """
    kind, wanted = kind or detect(path), part or Wanted()
    _check_columns(wanted.columns, kind)
    opened = _opened(path, Path(path).expanduser(), kind, wanted.columns)
    if wanted.only_classes is not None:
        opened = _of_classes(opened, wanted.only_classes)
    return opened if wanted.subset is None else _first(opened, wanted.subset)


def _check_columns(asked: Asked, kind: Kind) -> None:
    uses = {"image": ("csv", "parquet", "huggingface"), "label": ("csv", "parquet", "huggingface")}
    for name, kinds in {**uses, "split": ("csv", "parquet")}.items():
        if getattr(asked, name) != "auto" and kind not in kinds:
            raise DataError(f"--{name}-column has no effect on a source of the kind {kind}: leave it out.")


def _opened(path: str, root: Path, kind: Kind, asked: Asked) -> OpenedOrigin:
    given: dict[str, Any] = {"channels": None, "validation_fraction": 0}
    match kind:
        case "cifar10" | "cifar100" | "mnist" | "fashion_mnist":
            return _open_archive(root, kind)
        case "huggingface":
            given |= {"label_column": asked.label, "image_column": asked.image}
            return _of_images(kind, open_huggingface(root, in_any_order=False, **given), str(root))
        case "parquet":
            return _of_images(kind, open_parquet(path, asked=asked, in_any_order=False, **given), str(root))
        case "csv":
            return _of_images(kind, open_csv(root, asked=asked, **given), str(root.absolute().parent))
        case "webdataset":
            return _of_images(kind, open_webdataset(path, **given), str(root))
        case "packed":
            return _open_packed(root)
    return _of_images(kind, open_image_folder(root, **given), str(root))


def _of_classes(opened: OpenedOrigin, asked: Sequence[int | str]) -> OpenedOrigin:
    chosen = choose_classes(asked, opened.classes, "--only-classes")
    names = tuple(opened.classes[number] for number in chosen)
    parts = {name: of_classes(split.source, chosen, len(opened.classes)) for name, split in opened.splits.items()}
    for name, part in parts.items():
        missing = sorted(set(range(len(chosen))) - set(part.labels.tolist()))
        if missing and (name == "train" or len(part) == 0):
            raise DataError(f"--only-classes names {names[missing[0]]!r}, of which there is no {name} image.")
    digest = digest_of(opened.origin.digest, "only classes", names, *(part.ids for part in parts.values()))
    return replace(opened, classes=names, splits=_parts(opened, parts), origin=replace(opened.origin, digest=digest))


def _first(opened: OpenedOrigin, part: int | str) -> OpenedOrigin:
    parts = {"train": first_of_all(opened.splits["train"].source, part, "--subset")}
    digest = digest_of(opened.origin.digest, "subset", parts["train"].ids)
    return replace(opened, splits=_parts(opened, parts), origin=replace(opened.origin, digest=digest))


def _parts(opened: OpenedOrigin, parts: Mapping[str, SubsetSource]) -> dict[str, OriginSplit]:
    """The splits of a source, of which parts were taken; images keep their names."""
    taken = {}
    for name, split in opened.splits.items():
        if name not in parts:
            taken[name] = split
            continue
        # A part's ids are those of the whole source, whatever parts were taken on the way.
        whole = split.name.name if isinstance(split.name, PartName) else split.name
        taken[name] = OriginSplit(source=parts[name], name=PartName(whole, parts[name].ids))
    return taken


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
            return "parquet" if path.endswith(".parquet") else "webdataset"
        raise DataError(f"there is no {str(root)!r}: correct the path.")
    if not root.is_dir():
        refuse_odd_kinds(root)
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
    if (".json" in suffixes or ".parquet" in suffixes) and (found := find_files(root)) is not None:
        return _kind_of_tables(found)
    if suffixes & _COMPRESSED and ".tar" not in suffixes and not any(each.is_dir() for each in root.iterdir()):
        raise DataError(f"{str(root)!r} holds compressed files: uncompress them, for tars are read where images lie.")
    return "webdataset" if ".tar" in suffixes else "image_folder"


def _kind_of_file(path: Path) -> Kind:
    for start, kind in _ARCHIVES.items():
        if path.name.startswith(start):
            return kind
    if path.suffix.lower() in (".csv", ".tsv"):
        return "csv"
    if path.suffix.lower() == ".parquet" and (found := find_files(path)) is not None:
        return _kind_of_tables(found)
    if path.suffix.lower() == ".tar":
        return "webdataset"
    raise DataError(
        f"{str(path)!r} is a file, and none that can be packed by its name (a .tar of WebDataset, a .parquet, a .csv "
        "or .tsv of paths and labels, cifar-10-*.tar.gz or cifar-100-*.tar.gz): name a folder, or tell `pack` what it "
        "is with --kind."
    )


def _kind_of_tables(found: HuggingFaceFiles) -> Kind:
    """Hugging Face's, if they say what is an image and what a label; otherwise tables of anyone's."""
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


def _of_images(kind: Kind, opened: ImageFolder | StoredImages, root: str) -> OpenedOrigin:
    """A source that is opened for training in the same way."""
    sources: dict[str, SampleSource] = {"train": opened.train, "validation": opened.validation}
    if opened.is_split_off:
        assert isinstance(opened.train, SubsetSource)
        sources = {"train": opened.train.base}
    return OpenedOrigin(
        origin=Origin(kind=kind, digest=opened.digest, held_out="" if opened.is_split_off else opened.split),
        classes=tuple(map(utf8, opened.classes)),
        channels=1 if opened.channels == 1 else 3,
        splits={name: _split(source, root) for name, source in sources.items()},
        left_out=opened.left_out,
    )


def _split(source: SampleSource, root: str) -> OriginSplit:
    if isinstance(source, SubsetSource):
        whole = _split(source.base, root)
        return OriginSplit(source=source, name=PartName(whole.name, source.ids))
    if isinstance(source, FileSource):
        return OriginSplit(source=source, name=RelativeName(source, root))
    if isinstance(source, MappedSource | PackedPixels | ParquetSource):
        return OriginSplit(source=source, name=InnerName(source.names))
    return OriginSplit(source=source, name=source.path)


def _open_packed(root: Path) -> OpenedOrigin:
    manifest = open_packed(root).manifest
    opened, _ = packed_images(root, channels=manifest.form.channels, validation_fraction=0)
    found = _of_images("packed", opened, str(root))
    return replace(
        found,
        origin=replace(manifest.origin, digest=manifest.digest),
    )


def _open_archive(root: Path, kind: ArchiveName) -> OpenedOrigin:
    if find_archive(root, kind) is None:
        raise DataError(f"{str(root)!r} holds no files of {kind}: correct the path, or leave --kind out.")
    read = read_archive(root, kind)
    return OpenedOrigin(
        origin=Origin(
            kind=kind,
            digest=array_digest(read.train, read.test),
            held_out="the archive's test images",
            mean=read.mean,
            std=read.std,
        ),
        classes=read.classes,
        channels=1 if read.train.images.shape[-1] == 1 else 3,
        splits={
            "train": OriginSplit(source=read.train, name=read.train.path),
            "validation": OriginSplit(source=read.test, name=read.test.path),
        },
    )


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
