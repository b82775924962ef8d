"""Images inside larger files, read as slices of memory-mapped files: no file is opened per image.

Image positions are stored in a few numpy arrays. Loader processes share these and the mapped files, whose pages are the
system's page cache. No Python object is kept per image.
"""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from paceline.data.image.decode import BrokenImageError, decode, image_header, upright_size
from paceline.data.image.source import Head, Ids, Image, NameArray
from paceline.errors import data_error
from paceline.parsing.files import refuse_special_inputs

# Each mapped file holds a file descriptor; the usual limit is 1024 per process.
_MOST_MAPPED = 256


class MappedFile(NamedTuple):
    """A file in the state in which it was opened.

    Attributes:
        path: Its path.
        size: Its length in bytes.
        changed: Its inode and modification time in nanoseconds, to detect a replaced file.
    """

    path: str
    size: int
    changed: tuple[int, ...]

    @classmethod
    def at(cls, path: Path | str) -> MappedFile:
        """Record the file at a path; raises OSError."""
        status = os.stat(path)
        return cls(os.fspath(path), status.st_size, (status.st_ino, status.st_mtime_ns))


@dataclass(frozen=True, kw_only=True)
class ByteRanges:
    """Positions of N images.

    Attributes:
        file: Index of its file, integers [N].
        begin: Offset of its first byte, integers [N].
        length: Length in bytes, integers [N].
    """

    file: NDArray[Any]
    begin: NDArray[Any]
    length: NDArray[Any]

    def part(self, chosen: slice | Ids) -> ByteRanges:
        """Return the positions of some of the images."""
        return ByteRanges(file=self.file[chosen], begin=self.begin[chosen], length=self.length[chosen])


class MappedBytes:
    """Parts of files, read without copying them."""

    def __init__(self, files: Sequence[MappedFile], ranges: ByteRanges) -> None:
        self._files = tuple(files)
        self._ranges = ranges

    def __len__(self) -> int:
        return len(self._ranges.begin)

    def __getitem__(self, index: int) -> memoryview:
        """Return part ``index``; raises OSError if its file is gone or has changed."""
        ranges, begin = self._ranges, int(self._ranges.begin[index])
        return memoryview(_mapped(self._files[ranges.file[index]]))[begin : begin + int(ranges.length[index])]

    def will_read(self, indices: Ids) -> None:
        """Prefetch these parts from the disk in the background."""
        for index in indices.tolist():
            begin, length = int(self._ranges.begin[index]), int(self._ranges.length[index])
            page = begin - begin % mmap.PAGESIZE
            with suppress(OSError):  # the error appears when it is read
                _mapped(self._files[self._ranges.file[index]]).madvise(mmap.MADV_WILLNEED, page, begin - page + length)

    def part(self, begin: int, end: int) -> MappedBytes:
        """Return parts ``begin`` to ``end`` of the same files."""
        return MappedBytes(self._files, self._ranges.part(slice(begin, end)))

    @property
    def paths(self) -> list[str]:
        """Return the paths of all files."""
        return [file.path for file in self._files]

    def file_of(self, index: int) -> str:
        """Return the path of the file that contains part ``index``."""
        return self._files[int(self._ranges.file[index])].path


# A file has one descriptor and mapping for all sources of the process; forks inherit them.
@lru_cache(maxsize=_MOST_MAPPED)
def _mapped(file: MappedFile) -> mmap.mmap:
    with open(file.path, "rb") as stream:
        status = os.fstat(stream.fileno())
        if (status.st_size, (status.st_ino, status.st_mtime_ns)) != (file.size, file.changed):
            # Reading mapped memory beyond the end of a truncated file kills the process.
            raise OSError(0, "it has changed since the run started")
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


class EncodedImages:
    """Image files inside larger files, decoded when read; a subclass defines :meth:`encoded` and the rest."""

    channels: int
    labels: Ids

    def __len__(self) -> int:
        return len(self.labels)

    def encoded(self, sample: int) -> memoryview:
        """Return the content of image file ``sample`` without copying; raises BrokenImageError."""
        raise NotImplementedError

    def path(self, sample: int) -> str:
        """Return the sample's name and position."""
        raise NotImplementedError

    def read(self, sample: int) -> Image:
        """Decode image ``sample``; raises BrokenImageError."""
        content = bytes(self.encoded(sample))
        try:
            return decode(content, self.channels)
        except BrokenImageError as error:
            raise BrokenImageError(self.path(sample), error.reason) from error

    def head(self, sample: int) -> Head | None:
        """Return ((height, width), is greyscale) of image ``sample`` from its header; None if unreadable."""
        try:
            return image_header(io.BytesIO(self.encoded(sample)))
        except BrokenImageError:  # the error appears when it is read
            return None

    def size(self, sample: int) -> tuple[int, int] | None:
        """Return (height, width) of image ``sample`` from its header; None if unreadable."""
        try:
            return upright_size(io.BytesIO(self.encoded(sample)))
        except BrokenImageError:  # the error appears when it is read
            return None


class MappedSource(EncodedImages):
    """Image files inside larger files that are mapped into memory."""

    def __init__(self, content: MappedBytes, labels: Ids, channels: int, names: NameArray) -> None:
        """Take one part per label; ``names`` are the sample names inside the files."""
        if len(content) != len(labels):
            raise ValueError(f"found {len(content)} parts for {len(labels)} labels")
        self.labels = labels
        self.channels = channels
        self.names = names
        self._content = content

    def encoded(self, sample: int) -> memoryview:
        """Return the content of image file ``sample`` without copying; raises BrokenImageError."""
        try:
            return self._content[sample]
        except OSError as error:
            place = f"{self._content.file_of(sample)}, in which it lies: "
            raise BrokenImageError(self.path(sample), place + (error.strerror or str(error))) from error

    def files(self, samples: Ids) -> list[str]:
        """Return the paths of all files."""
        return self._content.paths

    def will_read(self, samples: Ids) -> None:
        """Prefetch the images from the disk before they are read one by one."""
        self._content.will_read(samples)

    def path(self, sample: int) -> str:
        """Return the sample's name and its file."""
        return f"{self.names.text(sample)} in {self._content.file_of(sample)}"


def mapped_files(paths: Iterable[Path]) -> list[MappedFile]:
    """Record the files to be mapped.

    Raises:
        DataError: If one is missing or cannot be read.
    """
    files = []
    for path in paths:
        refuse_special_inputs(path)
        try:
            files.append(MappedFile.at(path))
        except OSError as error:
            raise data_error(path, f"cannot be read: {error.strerror}; correct the path.") from error
    return files
