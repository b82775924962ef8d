"""What does a packed dataset consist of? Files that any Arrow tool opens, and ``packed.json``, which describes them.

    packed.json             what is in it, and the size and SHA-256 of every other file; written last
    index.arrow             one row per image: split, label, name, height, width, shard, offset, length, SHA-256
    train-00000.arrow …     the images with their labels and names
    validation-00000.arrow …

Reading needs no Arrow library: ``packed.json`` names the bytes of each column of the index, and the index those of each
image.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from paceline.errors import DataError
from paceline.files import refuse_odd_kinds
from paceline.plain_json import load_json

MANIFEST = "packed.json"
INDEX = "index.arrow"
UNFINISHED = ".packing"
FORMAT = "paceline-packed-1"

Mode = Literal["original", "jpeg", "raw"]
Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")

Count = Annotated[int, Field(ge=0, strict=True)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
# Not a path: a file of this directory.
FileName = Annotated[str, Field(pattern=r"^[a-z]+(-\d+)?\.arrow$")]

_STRICT: Any = {"extra": "forbid"}


@checked_dataclass(frozen=True, kw_only=True, config=_STRICT)
class FileFacts:
    """A file of the dataset.

    Attributes:
        name: Its name in the directory.
        size: Its length in bytes.
        sha256: Of its content.
    """

    name: FileName
    size: Count
    sha256: Digest


ColumnType = Literal["<i4", "<i8", "|u1"]


@checked_dataclass(frozen=True, kw_only=True, config=_STRICT)
class Column:
    """Where a column of the index lies in its file.

    Attributes:
        dtype: How numpy calls its elements.
        offset: Its first byte.
        count: Number of elements.
    """

    dtype: ColumnType
    offset: Count
    count: Count


@checked_dataclass(frozen=True, kw_only=True, config=_STRICT)
class LeftOut:
    """An image of the source that could not be read, and was left out on request."""

    split: Split
    name: str
    reason: str


@checked_dataclass(frozen=True, kw_only=True, config=_STRICT)
class Form:
    """How images are stored.

    Attributes:
        mode: ``original`` (the files as they are), ``jpeg`` (encoded anew) or ``raw`` (pixels).
        max_side: Longest side in pixels; longer images are made smaller. None for no limit.
        quality: Of ``jpeg``, 1 to 100.
        size: Side in pixels of the squares that ``raw`` images are cropped to; None to keep their shapes.
        channels: Of ``raw``, 1 or 3; else what images are decoded to where the recipe does not say.
    """

    mode: Mode
    channels: Literal[1, 3]
    max_side: Annotated[int, Field(gt=0)] | None = None
    quality: Annotated[int, Field(ge=1, le=100)] | None = None
    size: Annotated[int, Field(gt=0)] | None = None


@checked_dataclass(frozen=True, kw_only=True, config=_STRICT)
class Origin:
    """What was packed.

    Attributes:
        kind: What kind of source.
        digest: Of the source: names and sizes of its files, or its content.
        held_out: Where its validation images come from; empty if it has none of its own.
        mean: Of its training images, if it is a set with known ones.
        std: Likewise.
    """

    kind: str
    digest: str
    held_out: str = ""
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None


@checked_dataclass(frozen=True, kw_only=True, config=_STRICT)
class Manifest:
    """The content of ``packed.json``.

    Attributes:
        origin: What was packed.
        form: How.
        classes: Class names; a label is an index into them.
        samples: Number of images of each split.
        native_size: Height and width if all images share them.
        digest: SHA-256 over labels, names, shapes and contents of all images, whatever shards they lie in.
        left_out: Images that could not be read.
        index: The index.
        columns: Its columns.
        shards: The shards; the index calls them by their number.
    """

    origin: Origin
    form: Form
    classes: tuple[str, ...]
    samples: dict[Split, Count]
    native_size: tuple[Count, Count] | None
    digest: Digest
    left_out: tuple[LeftOut, ...]
    index: FileFacts
    columns: dict[str, Column]
    shards: tuple[FileFacts, ...]

    @property
    def files(self) -> tuple[FileFacts, ...]:
        """Every file but ``packed.json`` itself."""
        return (self.index, *self.shards)

    @property
    def total(self) -> int:
        """Number of images."""
        return sum(self.samples.values())

    @property
    def size_bytes(self) -> int:
        """Length of all files but ``packed.json``."""
        return sum(file.size for file in self.files)

    def encode(self) -> bytes:
        """The file's content, which holds a digest of itself."""
        tree = TypeAdapter(Manifest).dump_python(self, mode="json")
        head = {"format": FORMAT, "sha256": _own_digest(tree)}
        return (json.dumps({**head, **tree}, indent=1, ensure_ascii=False) + "\n").encode()


@dataclass(frozen=True)
class Shard:
    """Some images of one split that follow one another, and become one file.

    Attributes:
        split: Which split.
        number: Of the split's shards, which one.
        begin: First sample of the source.
        end: Its last, excluded.
    """

    split: Split
    number: int
    begin: int
    end: int

    @property
    def file(self) -> str:
        """Name of the shard's file."""
        return f"{self.split}-{self.number:05d}.arrow"


def read_manifest(root: Path) -> Manifest:
    """Read ``packed.json``.

    Raises:
        DataError: If there is none, or it is damaged.
    """
    path = root / MANIFEST
    refuse_odd_kinds(path)
    try:
        tree = load_json(path.read_bytes())
    except FileNotFoundError as error:
        raise _no_manifest(root) from error
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    known = tree.pop("format", None) if isinstance(tree, dict) else None
    if known != FORMAT:
        raise _damaged(path, f"it is of the format {known!r}, and {FORMAT!r} is read here")
    if tree.pop("sha256", None) != _own_digest(tree):
        raise _damaged(path, "its content is not what its digest says")
    try:
        # Through text, because JSON's lists are tuples here.
        return TypeAdapter(Manifest).validate_json(json.dumps(tree))
    except ValidationError as error:
        raise _damaged(path, error.errors()[0]["msg"]) from error


def _no_manifest(root: Path) -> DataError:
    if (root / UNFINISHED).is_dir():
        return DataError(
            f"{str(root)!r} is a packed dataset that is not finished: run the same `paceline pack` command again, "
            "which goes on where it was interrupted."
        )
    there = f"has no {MANIFEST}" if root.is_dir() else "is no directory"
    return DataError(f"{str(root)!r} is no packed dataset: it {there}; make one with `paceline pack SOURCE DEST`.")


def _damaged(path: Path, reason: str) -> DataError:
    return DataError(f"{str(path)!r} is damaged ({reason}): pack the source again.")


def _own_digest(tree: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
