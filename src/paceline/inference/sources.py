"""Which pictures do files, folders, patterns, archives and standard input mean, in which order?"""

from __future__ import annotations

import codecs
import glob
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paceline.data.image.decode import BrokenImageError, read_file
from paceline.data.image.source import EXTENSIONS
from paceline.errors import DataError
from paceline.files import LeftOut, files_below, has_ending, is_ignored, odd_kind, refuse_odd_kinds

STANDARD_INPUT = "-"
LARGEST_FILE_BYTES = 256 * 2**20
"""More than that is not read out of an archive or from standard input: it is no picture."""

OTHERS = "files whose endings are not those of images"
"""Why a file in a folder or an archive is left out."""

_PATTERN = frozenset("*?[")


@dataclass(frozen=True)
class PictureFile:
    """One file that may be a picture.

    Attributes:
        path: What it is called in answers; of a member, its archive and its name in there.
        read: Returns its content, or raises BrokenImageError.
    """

    path: Path
    read: Callable[[], bytes]

    @classmethod
    def at(cls, path: Path) -> PictureFile:
        """A file of the file system."""
        return cls(path, partial(_content_of, path))

    @classmethod
    def broken(cls, path: Path, reason: str) -> PictureFile:
        """One of which is known already that it cannot be read."""

        def refuse() -> bytes:
            raise BrokenImageError(str(path), reason)

        return cls(path, refuse)


def is_image_name(name: str) -> bool:
    """Whether a file's name ends as those of images do."""
    return has_ending(name, EXTENSIONS)


def _content_of(path: Path) -> bytes:
    if kind := odd_kind(path):
        raise BrokenImageError(str(path), f"it is {kind}, not a file")
    return read_file(path)


def pictures_of(sources: Sequence[Path], left_out: LeftOut) -> Iterator[PictureFile]:
    """The pictures meant by files, folders (searched through), patterns, archives and ``-``, in order.

    All sources are looked at before the first picture is read; archives, and the lines of standard input, only as far
    as they are asked for.

    Args:
        sources: The files, folders, patterns and archives.
        left_out: Told of what is there and is no picture; by archives, as far as they were read.

    Raises:
        DataError: If a source does not exist, holds no image, or is a pipe or a device.
    """
    found = [_opened(source, left_out) for source in sources]
    return itertools.chain.from_iterable(found)


def picture_from_standard_input() -> PictureFile:
    """The bytes of standard input as one picture."""

    def read() -> bytes:
        content = sys.stdin.buffer.read(LARGEST_FILE_BYTES + 1)
        if len(content) > LARGEST_FILE_BYTES:
            raise BrokenImageError(STANDARD_INPUT, f"more than {LARGEST_FILE_BYTES:,} bytes")
        return content

    return PictureFile(Path(STANDARD_INPUT), read)


def _opened(source: Path, left_out: LeftOut) -> Iterable[PictureFile]:
    from paceline.inference.archives import is_archive, members

    if str(source) == STANDARD_INPUT:
        found = _from_lines(sys.stdin.buffer)
        first = next(found, None)
        if first is None:
            raise DataError("no path came on standard input (-); give one image file's path on each line.")
        return itertools.chain([first], found)
    if is_archive(source) and source.is_file():
        return members(source, left_out)
    if source.is_dir():
        return _inside(source, left_out)
    if source.exists():
        refuse_odd_kinds(source)
        return [PictureFile.at(source)]
    if _PATTERN & set(str(source)):
        return _matching(str(source), left_out)
    raise DataError(
        f"'{source}' does not exist; give image files, folders or archives of them, patterns in quotes, or - for paths "
        "from standard input; or files of lines (.tsv, .txt, .jsonl) to a recommendation task."
    )


def _inside(folder: Path, left_out: LeftOut) -> list[PictureFile]:
    inside = []
    for name in files_below(folder, left_out):
        if is_image_name(name):
            inside.append(folder / name)
        else:
            left_out.add(OTHERS, str(folder / name))
    if not inside:
        raise DataError(
            f"'{folder}' holds no image; files with these endings are read: {', '.join(EXTENSIONS)}. Lines of "
            f"samples (.tsv, .txt, .jsonl) are given file by file. {'. '.join(left_out.told())}".rstrip()
        )
    return [PictureFile.at(path) for path in sorted(inside)]


def _matching(pattern: str, left_out: LeftOut) -> Iterable[PictureFile]:
    """What a pattern matches, by name: images, and the pictures of archives. Folders are not searched."""
    from paceline.inference.archives import is_archive, members

    usable = []
    for path in map(Path, sorted(glob.glob(pattern, recursive=True))):
        if path.is_dir():
            if "**" not in pattern:  # which matches folders on the way
                left_out.add("folders that a pattern matches, which are not searched", str(path))
        elif is_image_name(path.name) or is_archive(path):
            usable.append(path)
        elif not is_ignored(path.name):
            left_out.add(OTHERS, str(path))
    if not usable:
        raise DataError(
            f"the pattern '{pattern}' matches no image; files with these endings are read: {', '.join(EXTENSIONS)}. "
            "** stands for any folders between."
        )
    return itertools.chain.from_iterable(
        members(path, left_out) if is_archive(path) else (PictureFile.at(path),) for path in usable
    )


def _from_lines(lines: Iterable[bytes]) -> Iterator[PictureFile]:
    """One picture for each path; empty lines are none."""
    for line in lines:
        if name := line.removeprefix(codecs.BOM_UTF8).rstrip(b"\r\n"):
            yield PictureFile.at(Path(os.fsdecode(name)))
