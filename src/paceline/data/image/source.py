"""Sample sources: the small interface between image sets and back-ends.

A source is shared with forked loader processes, so it keeps its possibly millions of paths and labels in a few numpy
arrays. A list of a million strings would be copied page by page into every worker, because reading a Python object
writes its reference count.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from paceline.data.image.decode import HEIF_ENDINGS, BrokenImageError, decode, image_header, read_file, upright_size
from paceline.data.splits import Source

Image = NDArray[np.uint8]
Content = bytes | bytearray | memoryview
Ids = NDArray[np.int64]
Head = tuple[tuple[int, int], bool]
"""Height and width of an image, and whether it is greyscale."""

EXTENSIONS = ("bmp", "gif", "jpeg", "jpg", "png", "ppm", "tif", "tiff", "webp", *HEIF_ENDINGS)


@dataclass(frozen=True)
class NameArray:
    """Many names in two arrays: name *i* is ``blob[ends[i]:ends[i + 1]]``.

    Attributes:
        blob: All names as concatenated bytes, uint8.
        ends: Bounds of the names, int64 [N + 1].
    """

    blob: NDArray[np.uint8]
    ends: Ids

    @classmethod
    def of(cls, names: Iterable[bytes | str]) -> Self:
        """Join names: bytes from the system, or text, with non-UTF-8 bytes escaped (``\\udcff``)."""
        encoded = [each.encode("utf-8", "backslashreplace") if isinstance(each, str) else each for each in names]
        ends = np.zeros(len(encoded) + 1, dtype=np.int64)
        np.cumsum([len(name) for name in encoded], out=ends[1:])
        return cls(np.frombuffer(b"".join(encoded), dtype=np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> bytes:
        return self.blob[self.ends[index] : self.ends[index + 1]].tobytes()

    def text(self, index: int) -> str:
        """Return a name as text; bytes that are not UTF-8 are replaced."""
        return self[index].decode("utf-8", "replace")


class SampleSource(Source[Image], Protocol):
    """The labelled images of one split, uint8 [H, W, C]; they may be read-only."""

    @property
    def labels(self) -> Ids:
        """Class index of every sample, int64 [len]; or numeric or multi-label targets, float [len, K]."""
        ...


@runtime_checkable
class MeasuredSource(SampleSource, Protocol):
    """A source that knows image sizes without decoding; only rectangular evaluation needs it."""

    def size(self, sample: int) -> tuple[int, int] | None:
        """Return (height, width) of the image that :meth:`read` returns; None if unknown."""
        ...


@runtime_checkable
class EncodedSource(SampleSource, Protocol):
    """A source of image files that can return them undecoded, so that only the needed region is decoded."""

    def encoded(self, sample: int) -> Content:
        """Return the content of the file that :meth:`read` decodes.

        Raises:
            BrokenImageError: If the file cannot be read.
        """
        ...


class ImageFiles(SampleSource, Protocol):
    """A source of image files whose headers can be read separately."""

    channels: int

    def head(self, sample: int) -> Head | None:
        """Return ((height, width), is greyscale) of a file; None if its header is unreadable."""
        ...


def leaf_sources(source: SampleSource, samples: Ids) -> list[tuple[Any, Ids]]:
    """Return the innermost sources of a source's samples, with their indices there.

    Such a source may have methods ``files(samples)``, which returns the paths of the files that contain the samples,
    possibly with others; ``will_read(samples)``, which prefetches them from the disk; and ``pixels()``, which returns
    all images if they are in memory with one size, uint8 [N, H, W, C].
    """
    if isinstance(source, SubsetSource):
        return leaf_sources(source.base, source.ids[samples])
    if isinstance(source, JoinedSource):
        numbers = source.part_numbers[samples]
        parts = ((each, samples[numbers == i] - source.starts[i]) for i, each in enumerate(source.parts.values()))
        return [pair for each, ids in parts for pair in leaf_sources(each, ids)]
    return [(source, samples)]


def prefetch(source: SampleSource, samples: Ids) -> None:
    """Tell a source which samples will be read, if it supports prefetching."""
    for part, ids in leaf_sources(source, samples):
        if hasattr(part, "will_read"):
            part.will_read(np.unique(ids))


def files_of(source: SampleSource, samples: Ids) -> list[str] | None:
    """Return the paths of the files that contain samples; None if the source does not know them."""
    parts = leaf_sources(source, samples)
    if not all(hasattr(part, "files") for part, _ in parts):
        return None
    return [path for part, ids in parts for path in part.files(ids)]


class ArraySource:
    """Images already in memory."""

    def __init__(self, images: Image, labels: Ids, name: str) -> None:
        """Take ``images`` uint8 [N, H, W, C] and ``labels`` int64 [N]; ``name`` prefixes every sample's path."""
        if images.dtype != np.uint8 or images.ndim != 4 or len(images) != len(labels):
            raise ValueError(f"{name}: found images {images.dtype} {images.shape} and {len(labels)} labels")
        self.images = images
        self.labels = labels.astype(np.int64, copy=False) if labels.ndim == 1 else labels
        self.name = name

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, sample: int) -> Image:
        """Return image ``sample``, uint8 [H, W, C]."""
        image: Image = self.images[sample]
        return image

    def size(self, sample: int) -> tuple[int, int]:
        """Return (height, width) of all images."""
        return self.images.shape[1], self.images.shape[2]

    def path(self, sample: int) -> str:
        """Return ``name[sample]``."""
        return f"{self.name}[{sample}]"


class FileSource:
    """Image files, decoded when read."""

    def __init__(self, root: Path, names: NameArray | Iterable[bytes], labels: Ids, channels: int) -> None:
        """Take file names relative to ``root``, as the operating system's bytes, one per label."""
        self._names = names if isinstance(names, NameArray) else NameArray.of(names)
        if len(self._names) != len(labels):
            raise ValueError(f"found {len(self._names)} names for {len(labels)} labels")
        self.labels = labels
        self.channels = channels
        self._root = os.fspath(root)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, sample: int) -> Image:
        """Decode file ``sample``; raises BrokenImageError."""
        return decode(self.path(sample), self.channels)

    def encoded(self, sample: int) -> bytes:
        """Return the content of file ``sample``; raises BrokenImageError."""
        return read_file(self.path(sample))

    def head(self, sample: int) -> Head | None:
        """Return ((height, width), is greyscale) of file ``sample`` from its header; None if unreadable."""
        return image_header(self.path(sample))

    def size(self, sample: int) -> tuple[int, int] | None:
        """Return (height, width) of file ``sample`` from its header; None if unreadable."""
        return upright_size(self.path(sample))

    def path(self, sample: int) -> str:
        """Return the file's path."""
        return os.path.join(self._root, os.fsdecode(self._names[sample]))

    def files(self, samples: Ids) -> list[str]:
        """Return the files' paths."""
        return [self.path(sample) for sample in samples.tolist()]

    def exclude(self, samples: Sequence[int]) -> FileSource:
        """Return the source without some of its files; the others are renumbered."""
        kept = np.delete(np.arange(len(self)), samples)
        names = [self._names[sample] for sample in kept.tolist()]
        return FileSource(Path(self._root), names, self.labels[kept], self.channels)

    @property
    def names(self) -> NameArray:
        """File names relative to the root."""
        return self._names


class SubsetSource:
    """Some samples of another source, renumbered in the given order."""

    def __init__(self, base: SampleSource, ids: Ids, labels: Ids | None = None) -> None:
        """Take sample ``ids[i]`` of ``base`` as sample ``i``, with the base's class unless ``labels`` gives another."""
        self.base = base
        self.ids = ids
        self.labels: Ids = base.labels[ids] if labels is None else labels
        self._files = encoded_source(base)

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, sample: int) -> Image:
        """Read the base's sample; raises BrokenImageError."""
        return self.base.read(int(self.ids[sample]))

    def encoded(self, sample: int) -> Content:
        """Return the base's file, if it has files (:func:`encoded_source`); raises BrokenImageError."""
        assert self._files is not None
        return self._files.encoded(int(self.ids[sample]))

    def size(self, sample: int) -> tuple[int, int] | None:
        """Return the base's (height, width), if known."""
        return self.base.size(int(self.ids[sample])) if isinstance(self.base, MeasuredSource) else None

    def path(self, sample: int) -> str:
        """Return the base's name for the sample."""
        return self.base.path(int(self.ids[sample]))


class JoinedSource:
    """The samples of several sources, concatenated."""

    def __init__(self, parts: Mapping[str, SampleSource], labels: Ids) -> None:
        """Take the sources by their names, and the labels of all samples."""
        self.parts = dict(parts)
        self.labels = labels
        self.part_numbers: Ids = np.repeat(np.arange(len(parts)), [len(each) for each in parts.values()])
        self.starts = np.searchsorted(self.part_numbers, np.arange(len(parts))).tolist()
        self._pairs = list(parts.items())

    def __len__(self) -> int:
        return len(self.labels)

    def find(self, sample: int) -> tuple[str, SampleSource, int]:
        """Return the name of the part that contains a sample, the part, and the sample's index there."""
        part = int(self.part_numbers[sample])
        return *self._pairs[part], sample - self.starts[part]

    def read(self, sample: int) -> Image:
        """Read the part's sample; raises BrokenImageError."""
        _, source, number = self.find(sample)
        return source.read(number)

    def encoded(self, sample: int) -> Content:
        """Return the part's file, if it has files (:func:`encoded_source`); raises BrokenImageError."""
        _, source, number = self.find(sample)
        files = encoded_source(source)
        assert files is not None
        return files.encoded(number)

    def size(self, sample: int) -> tuple[int, int] | None:
        """Return the part's (height, width), if known."""
        _, source, number = self.find(sample)
        return source.size(number) if isinstance(source, MeasuredSource) else None

    def path(self, sample: int) -> str:
        """Return the part's name for the sample."""
        _, source, number = self.find(sample)
        return source.path(number)


def part_numbers(source: SampleSource) -> Ids | None:
    """Return the part index of each sample of a joined source, or of a subset of it; None for other sources."""
    if isinstance(source, SubsetSource):
        below = part_numbers(source.base)
        return None if below is None else below[source.ids]
    return source.part_numbers if isinstance(source, JoinedSource) else None


class RepeatedSource(SubsetSource):
    """A source with every sample repeated: ids ``i``, ``i + n``, ``i + 2n``, … of ``n`` are the same image."""

    def __init__(self, base: SampleSource, repeats: int) -> None:
        super().__init__(base, np.tile(np.arange(len(base)), repeats))


def repeated(source: SampleSource, repeats: int) -> SampleSource:
    """Return a source that repeats each sample."""
    return source if repeats == 1 else RepeatedSource(source, repeats)


def unrepeated(source: SampleSource) -> SampleSource:
    """Return the source with each sample once."""
    return source.base if isinstance(source, RepeatedSource) else source


def encoded_source(source: SampleSource) -> EncodedSource | None:
    """Return the source as one of undecoded files, or None if it, or an underlying source, has no files."""
    if isinstance(source, SubsetSource):
        return None if encoded_source(source.base) is None else source
    if isinstance(source, JoinedSource):
        return None if None in map(encoded_source, source.parts.values()) else source
    return source if isinstance(source, EncodedSource) and _decodes_as_we_do(type(source)) else None


def _decodes_as_we_do(kind: type) -> bool:
    """Whether ``read`` and ``encoded`` belong together: a class that overrides only one may decode differently."""
    return "encoded" in vars(next(each for each in kind.__mro__ if {"read", "encoded"} & vars(each).keys()))


def as_array(source: SampleSource) -> Image | None:
    """Return all images of a source that holds them in memory, uint8 [N, H, W, C], else None."""
    if isinstance(source, ArraySource):
        return source.images
    if isinstance(source, SubsetSource):
        images = as_array(source.base)
        return None if images is None else images[source.ids]
    pixels: Callable[[], Image | None] = getattr(source, "pixels", lambda: None)
    return pixels()


# ITU-R 601 luma in 16 bits, as in Pillow.
_LUMA = np.array([19595, 38470, 7471], dtype=np.uint32)


def with_channels(images: Image, wanted: int) -> Image:
    """Return images uint8 [..., C] with ``wanted`` channels, 1 or 3."""
    if images.shape[-1] == wanted:
        return images
    if wanted == 3:
        return np.repeat(images, 3, axis=-1)
    return ((images @ _LUMA + 0x8000) >> 16).astype(np.uint8)[..., None]


def array_digest(*sources: ArraySource) -> str:
    """SHA-256 over the images and labels."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(np.ascontiguousarray(source.images).data)
        digest.update(np.ascontiguousarray(source.labels).data)
    return digest.hexdigest()


Hashes = NDArray[np.uint64]


def sample_names(source: SampleSource) -> list[bytes]:
    """Return the name of every sample as UTF-8, relative to the data set's location.

    If several images share a name, the second gets the suffix ``#2``, and so on.
    """
    found = [_name(source, sample) for sample in range(len(source))]
    if len(set(found)) == len(found):
        return found
    seen: dict[bytes, int] = {}
    for index, name in enumerate(found):
        seen[name] = count = seen.get(name, 0) + 1
        if count > 1:
            found[index] = b"%s#%d" % (name, count)
    return found


def hashed_names(names: list[bytes], salt: bytes) -> Hashes:
    """Return a fixed number from 0 to 2**64 - 1 for each name; another salt gives other numbers."""
    joined = b"".join(hashlib.blake2b(name, digest_size=8, key=salt).digest() for name in names)
    return np.frombuffer(joined, dtype="<u8").astype(np.uint64)


def _name(source: SampleSource, sample: int) -> bytes:
    if isinstance(source, SubsetSource):
        return _name(source.base, int(source.ids[sample]))
    if isinstance(source, JoinedSource):
        part, within, number = source.find(sample)
        return part.encode("utf-8", "backslashreplace") + b"/" + _name(within, number)
    names = getattr(source, "names", None)  # within the data set
    if isinstance(names, NameArray) and not isinstance(source, FileSource):
        text = names.text(sample)  # UTF-8 within files, whatever the system's file name encoding
    else:
        name = source.path(sample) if names is None else names[sample]
        # Bytes that are not valid text are escaped, as in a packed dataset.
        text = os.fsdecode(name) if isinstance(name, bytes) else name
    return text.encode("utf-8", "backslashreplace")


__all__ = [
    "ArraySource",
    "BrokenImageError",
    "EncodedSource",
    "FileSource",
    "SampleSource",
    "SubsetSource",
    "as_array",
    "encoded_source",
]
