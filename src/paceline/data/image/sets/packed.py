"""A packed dataset: its layout, and opening it for training without hashing or scanning.

    packed.json             the content, and the size and SHA-256 of every other file; written last
    index.arrow             one row per image: split, label, name, height, width, shard, offset, length, SHA-256
    train-00000.arrow …     the images with their labels and names
    validation-00000.arrow …

Reading does not need the Arrow library: ``packed.json`` gives the byte range of each index column, and the index that
of each image. `paceline pack` writes it.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from paceline.data.image.dataset import DatasetRequest, Probe, Statistics, StoredImages, in_splits
from paceline.data.image.mapped import ByteRanges, MappedBytes, MappedFile, MappedSource
from paceline.data.image.sets import FILES, IMAGENET
from paceline.data.image.source import Ids, Image, NameArray, SampleSource, with_channels
from paceline.errors import DataError, data_error
from paceline.parsing.files import refuse_special_inputs
from paceline.parsing.plain_text import load_json
from paceline.plugins.dataset_registry import dataset

MANIFEST = "packed.json"
INDEX = "index.arrow"
UNFINISHED = ".packing"
FORMAT = "paceline-packed-1"

Mode = Literal["original", "jpeg", "raw"]
Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")

Count = Annotated[int, Field(ge=0, strict=True)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
# Not a path: only a file name in this directory.
FileName = Annotated[str, Field(pattern=r"^[a-z]+(-\d+)?\.arrow$")]

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def _checked(kind: type[T]) -> type[T]:
    config: Any = {"extra": "forbid"}
    return checked_dataclass(frozen=True, kw_only=True, config=config)(kind)  # type: ignore[return-value]  # still T


@_checked
class PackedFile:
    """A file of the dataset.

    Attributes:
        name: Its name in the directory.
        size: Its length in bytes.
        sha256: SHA-256 of its content.
    """

    name: FileName
    size: Count
    sha256: Digest


ColumnType = Literal["<i4", "<i8", "|u1"]


@_checked
class Column:
    """Position of an index column in its file.

    Attributes:
        dtype: numpy dtype of its elements.
        offset: Offset of its first byte.
        count: Number of elements.
    """

    dtype: ColumnType
    offset: Count
    count: Count


@_checked
class LeftOut:
    """An unreadable image of the source, left out on request."""

    split: Split
    name: str
    reason: str


@_checked
class Form:
    """Storage format of images.

    Attributes:
        mode: ``original`` (the unchanged files), ``jpeg`` (re-encoded) or ``raw`` (pixels).
        max_side: Longest side in pixels; longer images are downscaled. None for no limit.
        quality: JPEG quality, 1 to 100, for ``jpeg``.
        size: Side in pixels of the square crop of ``raw`` images; None to keep their shapes.
        channels: Channels of ``raw`` images, 1 or 3; otherwise the default channels for decoding.
    """

    mode: Mode
    channels: Literal[1, 3]
    max_side: Annotated[int, Field(gt=0)] | None = None
    quality: Annotated[int, Field(ge=1, le=100)] | None = None
    size: Annotated[int, Field(gt=0)] | None = None


@_checked
class Origin:
    """The source of a packed dataset.

    Attributes:
        kind: Kind of source.
        digest: Digest of the source: of file names and sizes, or of the content.
        held_out: Origin of its validation images; empty if it has no such split.
        mean: Known mean of its training images, if any.
        std: Known standard deviation, likewise.
    """

    kind: str
    digest: str
    held_out: str = ""
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None


@_checked
class PackedManifest:
    """The content of ``packed.json``.

    Attributes:
        origin: The source.
        form: The storage format.
        classes: Class names; a label is an index into them.
        samples: Number of images of each split.
        native_size: Height and width if all images share them.
        digest: SHA-256 over labels, names, shapes and contents of all images, independent of the shards.
        left_out: Unreadable images.
        index: The index.
        columns: Its columns.
        shards: The shards; the index refers to them by number.
    """

    origin: Origin
    form: Form
    classes: tuple[str, ...]
    samples: dict[Split, Count]
    native_size: tuple[Count, Count] | None
    digest: Digest
    left_out: tuple[LeftOut, ...]
    index: PackedFile
    columns: dict[str, Column]
    shards: tuple[PackedFile, ...]

    @property
    def files(self) -> tuple[PackedFile, ...]:
        """All files except ``packed.json``."""
        return (self.index, *self.shards)

    @property
    def total(self) -> int:
        """Number of images."""
        return sum(self.samples.values())

    @property
    def size_bytes(self) -> int:
        """Total size of all files except ``packed.json``."""
        return sum(file.size for file in self.files)

    def encode(self) -> bytes:
        """Return the file's content, which includes a digest of itself."""
        tree = TypeAdapter(PackedManifest).dump_python(self, mode="json")
        head = {"format": FORMAT, "sha256": _own_digest(tree)}
        return (json.dumps({**head, **tree}, indent=1, ensure_ascii=False) + "\n").encode()


@dataclass(frozen=True)
class Shard:
    """Consecutive images of one split that form one file.

    Attributes:
        split: Which split.
        number: Number of the shard within the split.
        begin: First sample of the source.
        end: End of the sample range, excluded.
    """

    split: Split
    number: int
    begin: int
    end: int

    @property
    def file(self) -> str:
        """Name of the shard's file."""
        return f"{self.split}-{self.number:05d}.arrow"


def read_manifest(root: Path) -> PackedManifest:
    """Read ``packed.json``.

    Raises:
        DataError: If it is missing or damaged.
    """
    path = root / MANIFEST
    refuse_special_inputs(path)
    try:
        tree = load_json(path.read_bytes())
    except FileNotFoundError as error:
        if (root / UNFINISHED).is_dir():
            raise data_error(
                root,
                "is an unfinished packed dataset: run the same `paceline pack` command again to resume it.",
            ) from error
        problem = f"has no {MANIFEST}" if root.is_dir() else "is not a directory"
        problem = f"is not a packed dataset: it {problem}; make one with `paceline pack SOURCE DEST`."
        raise data_error(root, problem) from error
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    version = str(tree.pop("format", "")) if isinstance(tree, dict) else ""
    if version != FORMAT and version.startswith(FORMAT.rstrip("0123456789")):
        reason = f"has the format {version!r}, and this version of Paceline reads {FORMAT!r}"
        raise data_error(path, f"{reason}: use the version that wrote it, or pack the source again elsewhere.")
    if version != FORMAT or tree.pop("sha256", None) != _own_digest(tree):
        raise _damaged(path, "its content does not match its digest")
    try:
        # Via JSON text, because JSON lists are tuples here.
        return TypeAdapter(PackedManifest).validate_json(json.dumps(tree))
    except ValidationError as error:
        raise _damaged(path, error.errors()[0]["msg"]) from error


def _damaged(path: Path, reason: str) -> DataError:
    return data_error(path, f"is damaged ({reason}): pack the source again.")


def _own_digest(tree: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


Values = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class PackedIndex:
    """Facts about each image: memory-mapped columns of the index.

    Attributes:
        label: Class index, int64 [N].
        name: Name in the source.
        height: In pixels, int32 [N].
        width: In pixels, int32 [N].
        ranges: Positions of the images.
        sha256: SHA-256 of each image's content, uint8 [N, 32].
    """

    label: Values
    name: NameArray
    height: Values
    width: Values
    ranges: ByteRanges
    sha256: Values

    def part(self, begin: int, end: int) -> PackedIndex:
        """Return rows ``begin`` to ``end``, as views."""
        rows = slice(begin, end)
        return PackedIndex(
            label=self.label[rows],
            name=NameArray(self.name.blob, self.name.ends[begin : end + 1]),
            height=self.height[rows],
            width=self.width[rows],
            ranges=self.ranges.part(rows),
            sha256=self.sha256[rows],
        )

    def __len__(self) -> int:
        return len(self.label)


class PackedFiles(MappedSource):
    """The image files of one split."""

    def __init__(self, content: MappedBytes, index: PackedIndex, channels: int) -> None:
        super().__init__(content, index.label.copy(), channels, index.name)
        self.heights, self.widths = index.height, index.width

    def size(self, sample: int) -> tuple[int, int]:
        """Return (height, width) of image ``sample`` from the index."""
        return int(self.heights[sample]), int(self.widths[sample])


class PackedPixels:
    """The images of one split, stored as pixels that need no decoding."""

    def __init__(self, parts: PackedFiles, channels: int) -> None:
        """Take the file parts that store pixels with this number of channels."""
        self.labels: Ids = parts.labels
        self._parts, self._stored = parts, channels
        self.size, self.path, self.will_read, self.names = parts.size, parts.path, parts.will_read, parts.names

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, sample: int) -> Image:
        """Return image ``sample``, read-only uint8 [H, W, C]; raises BrokenImageError."""
        image = np.frombuffer(self._parts.encoded(sample), dtype=np.uint8)
        return with_channels(image.reshape(*self.size(sample), self._stored), self._parts.channels)

    def pixels(self) -> Image | None:
        """Return a copy of all images, uint8 [N, H, W, C], or None if their sizes differ."""
        if len(self) == 0 or np.ptp(self._parts.heights) or np.ptp(self._parts.widths):
            return None
        images = np.empty((len(self), *self.size(0), self._parts.channels), dtype=np.uint8)
        for sample in range(len(self)):
            images[sample] = self.read(sample)
        return images


@dataclass(frozen=True)
class PackedDataset:
    """An opened packed dataset.

    Attributes:
        root: Its directory.
        manifest: Content of ``packed.json``.
        content: The bytes of every image, training images first.
        index: Facts about each image.
    """

    root: Path
    manifest: PackedManifest
    content: MappedBytes
    index: PackedIndex


def open_packed(root: Path, *, check_index: bool = True) -> PackedDataset:
    """Open a packed dataset without reading any image.

    Args:
        root: Its directory.
        check_index: Whether to validate its index.

    Raises:
        DataError: If it is incomplete, a file is missing or has the wrong size, or its index refers to missing content.
    """
    manifest = read_manifest(root)
    files = {}
    for facts in manifest.files:
        try:
            files[facts.name] = MappedFile.at(root / facts.name)
        except OSError as error:
            raise _incomplete(root / facts.name, f"cannot be opened ({error.strerror})") from error
        if files[facts.name].size != facts.size:
            actual_size = files[facts.name].size
            raise _incomplete(root / facts.name, f"has {actual_size} bytes instead of {facts.size}")
    with open(root / manifest.index.name, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    columns = {
        name: np.frombuffer(mapped, dtype=column.dtype, count=column.count, offset=column.offset)
        for name, column in manifest.columns.items()
    }
    ranges = ByteRanges(file=columns["shard"], begin=columns["offset"], length=columns["length"])
    if check_index:
        _check_index(root, manifest, columns["label"], ranges)
    index = PackedIndex(
        label=columns["label"],
        name=NameArray(columns["name"], columns["name_ends"]),
        height=columns["height"],
        width=columns["width"],
        ranges=ranges,
        sha256=columns["sha256"].reshape(-1, 32),
    )
    return PackedDataset(root, manifest, MappedBytes([files[each.name] for each in manifest.shards], ranges), index)


@dataset(
    "packed",
    sniff=lambda place: (place.path / MANIFEST).is_file() or (place.path / UNFINISHED).is_dir(),
    keys=FILES,
    size=IMAGENET,
)
def packed_images(request: DatasetRequest) -> StoredImages:
    """Open a dataset from ``paceline pack`` as training and held-out images.

    Raises:
        DataError: See :func:`open_packed`.
    """
    packed = open_packed(request.path)
    manifest, form, origin = packed.manifest, packed.manifest.form, packed.manifest.origin
    channels = request.channels or form.channels
    sources: list[SampleSource] = []
    begin = 0
    for split in SPLITS if origin.held_out else SPLITS[:1]:
        end = begin + manifest.samples.get(split, 0)
        index, content = packed.index.part(begin, end), packed.content.part(begin, end)
        files = PackedFiles(content, index, channels)
        sources.append(PackedPixels(files, form.channels) if form.mode == "raw" else files)
        begin = end
    statistics = None
    if origin.mean is not None and origin.std is not None and len(origin.mean) == channels:
        statistics = Statistics(origin.mean, origin.std, "of the set that was packed")
    return in_splits(
        sources,
        origin.held_out,
        request.data.validation_fraction,
        classes=manifest.classes,
        digest=manifest.digest,
        channels=channels,
        probe=Probe(count=manifest.total, size=manifest.native_size, greyscale=form.channels == 1),
        statistics=statistics,
    )


def _check_index(root: Path, manifest: PackedManifest, labels: Ids, ranges: ByteRanges) -> None:
    """Validate the index: a wrong position would be read as an image, and a wrong class would reach the loss."""
    if len(labels) == 0:
        return
    sizes = np.array([each.size for each in manifest.shards], dtype=np.int64)
    is_sound = (
        len(labels) == sum(manifest.samples.values())
        and labels.min() >= 0
        and labels.max() < len(manifest.classes)
        and ranges.file.min() >= 0
        and ranges.file.max() < len(sizes)
        and min(ranges.begin.min(), ranges.length.min()) >= 0
        and bool((ranges.begin.astype(np.int64) + ranges.length <= sizes[ranges.file]).all())
    )
    if not is_sound:
        raise _incomplete(root / manifest.index.name, "names classes or positions that do not exist")


def _incomplete(path: Path, reason: str) -> DataError:
    return data_error(path, f"{reason}: the packed dataset is damaged; copy it again, or pack the source again.")
