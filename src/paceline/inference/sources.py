"""Which pictures do files, folders, patterns, archives and standard input mean, in which order?"""

from __future__ import annotations

import glob
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paceline.data.image.decode import BrokenImageError, read_file
from paceline.data.image.folder import EXTENSIONS
from paceline.errors import DataError

STANDARD_INPUT = "-"
LARGEST_FILE_BYTES = 256 * 2**20
"""More than that is not read out of an archive or from standard input: it is no picture."""

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
        return cls(path, partial(read_file, path))

    @classmethod
    def broken(cls, path: Path, reason: str) -> PictureFile:
        """One of which is known already that it cannot be read."""

        def refuse() -> bytes:
            raise BrokenImageError(str(path), reason)

        return cls(path, refuse)


def is_image_name(name: str) -> bool:
    """Whether a file's name ends as those of images do."""
    return name.rpartition(".")[2].lower() in EXTENSIONS


def pictures_of(sources: Sequence[Path]) -> Iterator[PictureFile]:
    """The pictures meant by files, folders (searched through), patterns, archives and ``-``, in order.

    All sources are looked at before the first picture is read; archives, and the lines of standard input, only as far
    as they are asked for.

    Raises:
        DataError: If a source does not exist, or holds no image.
    """
    found = [_opened(source) for source in sources]
    return itertools.chain.from_iterable(found)


def picture_from_standard_input() -> PictureFile:
    """The bytes of standard input as one picture."""

    def read() -> bytes:
        content = sys.stdin.buffer.read(LARGEST_FILE_BYTES + 1)
        if len(content) > LARGEST_FILE_BYTES:
            raise BrokenImageError(STANDARD_INPUT, f"more than {LARGEST_FILE_BYTES:,} bytes")
        return content

    return PictureFile(Path(STANDARD_INPUT), read)


def _opened(source: Path) -> Iterable[PictureFile]:
    from paceline.inference.archives import is_archive, members

    if str(source) == STANDARD_INPUT:
        found = _from_lines(sys.stdin.buffer)
        first = next(found, None)
        if first is None:
            raise DataError("no path came on standard input (-); give one image file's path on each line.")
        return itertools.chain([first], found)
    if is_archive(source) and source.is_file():
        return members(source)
    if source.exists() and not source.is_dir():
        return [PictureFile.at(source)]
    if source.is_dir():
        return _inside(source)
    if _PATTERN & set(str(source)):
        return _matching(str(source))
    raise DataError(
        f"'{source}' does not exist; give image files, folders or archives of them, patterns in quotes, or - for paths "
        "from standard input; or files of lines (.tsv, .txt, .jsonl) to a recommendation task."
    )


def _inside(folder: Path) -> list[PictureFile]:
    inside = sorted(path for path in folder.rglob("*") if is_image_name(path.name) and path.is_file())
    if not inside:
        raise DataError(
            f"'{folder}' holds no image; files with these endings are read: {', '.join(EXTENSIONS)}. Lines of "
            "samples (.tsv, .txt, .jsonl) are given file by file."
        )
    return [PictureFile.at(path) for path in inside]


def _matching(pattern: str) -> Iterable[PictureFile]:
    """What a pattern matches, by name: images, and the pictures of archives. Folders are not searched."""
    from paceline.inference.archives import is_archive, members

    paths = [Path(each) for each in sorted(glob.glob(pattern, recursive=True)) if not Path(each).is_dir()]
    usable = [path for path in paths if is_image_name(path.name) or is_archive(path)]
    if not usable:
        raise DataError(
            f"the pattern '{pattern}' matches no image; files with these endings are read: {', '.join(EXTENSIONS)}. "
            "** stands for any folders between."
        )
    return itertools.chain.from_iterable(
        members(path) if is_archive(path) else (PictureFile.at(path),) for path in usable
    )


def _from_lines(lines: Iterable[bytes]) -> Iterator[PictureFile]:
    """One picture for each path; empty lines are none."""
    for line in lines:
        if name := line.rstrip(b"\r\n"):
            yield PictureFile.at(Path(os.fsdecode(name)))
