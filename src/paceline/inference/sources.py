"""Pictures that files, folders, patterns, archives and standard input name, in order."""

from __future__ import annotations

import codecs
import glob
import gzip
import itertools
import os
import sys
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from paceline.data.image.dataset import BAD
from paceline.data.image.decode import BrokenImageError, read_file
from paceline.data.image.source import EXTENSIONS
from paceline.errors import DataError
from paceline.files import LeftOut, files_below, has_ending, is_ignored, is_ignored_member, odd_kind, refuse_odd_kinds

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


def _why_not(name: str) -> str:
    """Say why a file that has not an image's name is left out."""
    return BAD["heic_images"] if has_ending(name, ("heic", "heif")) else OTHERS


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
            left_out.add(_why_not(name), str(folder / name))
    if not inside:
        raise DataError(
            f"'{folder}' holds no image; files with these endings are read: {', '.join(EXTENSIONS)}. Lines of "
            f"samples (.tsv, .txt, .jsonl) are given file by file. {'. '.join(left_out.told())}".rstrip()
        )
    return [PictureFile.at(path) for path in sorted(inside)]


def _matching(pattern: str, left_out: LeftOut) -> Iterable[PictureFile]:
    """What a pattern matches, by name: images, and the pictures of archives. Folders are not searched."""
    usable = []
    for path in map(Path, sorted(glob.glob(pattern, recursive=True))):
        if path.is_dir():
            if "**" not in pattern:  # which matches folders on the way
                left_out.add("folders that a pattern matches, which are not searched", str(path))
        elif is_image_name(path.name) or is_archive(path):
            usable.append(path)
        elif not is_ignored(path.name):
            left_out.add(_why_not(path.name), str(path))
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


_TARS = (".tar", ".tar.gz", ".tgz")
_BLOCK = tarfile.BLOCKSIZE
_SPECIAL = (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)
_LONGEST_NAME_BYTES = 2**16
_PIECE_BYTES = 2**20
# What the readers of archives raise of damaged files, and zipfile (a RuntimeError) of locked ones and foreign methods.
_DAMAGES = (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error)


def is_archive(path: Path) -> bool:
    """Whether a file's name is that of an archive whose members can be read."""
    return path.name.lower().endswith((".zip", *_TARS))


def members(archive: Path, left_out: LeftOut) -> Iterator[PictureFile]:
    """The pictures in an archive, in its order; ``left_out`` is told of its other members.

    Members that cannot be read are pictures that cannot, and so is what follows where the archive itself is damaged.
    What an archive says of itself is not trusted: a member's size is limited whatever its header says, names that lead
    out of the archive are refused, links are not followed, and headers of a tar are read here, so that none of them can
    ask for more memory than a name needs.

    Raises:
        DataError: When the first is asked for: if the archive cannot be opened; at the end: if it held no image.
    """
    refuse_odd_kinds(archive)
    inside = _zipped(archive, left_out) if archive.name.lower().endswith(".zip") else _in_tar(archive, left_out)
    count = 0
    for picture in inside:
        count += 1
        yield picture
    if not count:
        raise DataError(f"'{archive}' holds no image; members with these endings are read: {', '.join(EXTENSIONS)}.")


def _shown(archive: Path, name: str) -> Path:
    """What a member is called in answers; a name never carries control characters to a terminal."""
    printable = name if name.isprintable() else ascii(name)[1:-1]
    return archive / printable.lstrip("/")


def _is_read(archive: Path, name: str, left_out: LeftOut) -> bool:
    """Whether a member is a picture by its name; of others it is told, unless they are ignored."""
    if is_ignored_member(name) and not _leads_out(name):
        return False
    if not is_image_name(name):
        left_out.add(_why_not(name), str(_shown(archive, name)))
        return False
    return True


def _leads_out(name: str) -> bool:
    return name.startswith(("/", "\\")) or ".." in PurePosixPath(name.replace("\\", "/")).parts or "\0" in name


def _refusal(name: str, size: int) -> str | None:
    """Why a member is not read, by its header."""
    if _leads_out(name):
        return "its name leads out of the archive"
    return f"{size:,} bytes; at most {LARGEST_FILE_BYTES:,} are read" if size > LARGEST_FILE_BYTES else None


class _Zip:
    """An open archive whose members are read by one thread at a time; it is closed when the last has been read."""

    def __init__(self, archive: Path) -> None:
        try:
            self._file = zipfile.ZipFile(archive)
        except _DAMAGES as error:
            raise DataError(f"'{archive}' cannot be read as a zip archive: {error}.") from error
        self._reading = threading.Lock()

    def entries(self) -> list[zipfile.ZipInfo]:
        """All members, in the order in which the archive names them."""
        return self._file.infolist()

    def read(self, entry: zipfile.ZipInfo, path: Path) -> bytes:
        """A member's content; raises BrokenImageError."""
        try:
            with self._reading, self._file.open(entry) as member:
                content = member.read(LARGEST_FILE_BYTES + 1)
        except _DAMAGES as error:
            raise BrokenImageError(str(path), f"cannot be read from its archive: {error}") from error
        if len(content) > LARGEST_FILE_BYTES:
            raise BrokenImageError(str(path), f"more than {LARGEST_FILE_BYTES:,} bytes")
        return content


def _zipped(archive: Path, left_out: LeftOut) -> Iterator[PictureFile]:
    file = _Zip(archive)
    for entry in file.entries():
        if entry.is_dir() or not _is_read(archive, entry.filename, left_out):
            continue
        path = _shown(archive, entry.filename)
        reason = _refusal(entry.filename, entry.file_size)
        if reason is not None:
            yield PictureFile.broken(path, reason)
        else:
            yield PictureFile(path, partial(file.read, entry, path))


class _DamagedTarError(Exception):
    """What is wrong with a tar; nothing after it can be read."""


def _in_tar(archive: Path, left_out: LeftOut) -> Iterator[PictureFile]:
    try:
        opened = archive.open("rb")
    except OSError as error:
        raise DataError(f"'{archive}' cannot be read: {error.strerror or error}.") from error
    with opened, opened if archive.name.lower().endswith(".tar") else gzip.GzipFile(fileobj=opened) as file:
        reader = _Tar(file, archive, left_out)
        first = True
        while True:
            try:
                found = reader.following()
            except (_DamagedTarError, *_DAMAGES) as error:
                if first:
                    raise DataError(f"'{archive}' cannot be read as a tar archive: {error}.") from error
                yield PictureFile.broken(archive, f"the archive is damaged, what follows cannot be read: {error}")
                return
            if found is None:
                return
            first = False
            name, content = found
            path = _shown(archive, name)
            if isinstance(content, str):
                yield PictureFile.broken(path, content)
            else:
                yield PictureFile(path, partial(bytes, content))


class _Tar:
    """Reads a tar from beginning to end, so that it may be a compressed stream; in pieces, and never back."""

    def __init__(self, file: BinaryIO | gzip.GzipFile, archive: Path, left_out: LeftOut) -> None:
        self._file = file
        self._archive = archive
        self._left_out = left_out

    def following(self) -> tuple[str, bytes | str] | None:
        """The next image: its name, and its content or why it is not read; None at the end."""
        name = None
        while (head := self._head()) is not None:
            padded = -(-head.size // _BLOCK) * _BLOCK
            if head.type in (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE):
                named = self._name(head, padded)
                name = name if named is None else named
                continue
            called, name = name or head.name, None
            if not self._is_read(head, called):
                self._skip(padded)
                continue
            reason = _refusal(called, head.size)
            if reason is not None:
                self._skip(padded)
                return called, reason
            return called, self._exactly(padded)[: head.size]
        return None

    def _is_read(self, head: tarfile.TarInfo, name: str) -> bool:
        if head.isreg():
            return _is_read(self._archive, name, self._left_out)
        if head.type in _SPECIAL and not is_ignored_member(name):
            self._left_out.add("links and special files in archives", str(_shown(self._archive, name)))
        return False

    def _head(self) -> tarfile.TarInfo | None:
        block = self._file.read(_BLOCK)
        if not block.strip(b"\0"):
            return None
        try:
            head = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise _DamagedTarError(str(error)) from error
        if head.size < 0:
            raise _DamagedTarError("a member's size is negative")
        return head

    def _name(self, head: tarfile.TarInfo, padded: int) -> str | None:
        """The name in a header that only names the next member; None if it says something else."""
        if padded > _LONGEST_NAME_BYTES:
            self._skip(padded)
            raise _DamagedTarError(f"a name of {head.size:,} bytes")
        content = self._exactly(padded)[: head.size]
        if head.type == tarfile.GNUTYPE_LONGNAME:
            return content.rstrip(b"\0").decode("utf-8", "surrogateescape")
        for record in content.split(b"\n"):
            if (key := record.partition(b" ")[2]).startswith(b"path="):
                return key[5:].decode("utf-8", "surrogateescape")
        return None

    def _exactly(self, count: int) -> bytes:
        content = self._file.read(count)
        while len(content) < count:
            piece = self._file.read(count - len(content))
            if not piece:
                raise _DamagedTarError("it ends in the middle of a member")
            content += piece
        return content

    def _skip(self, count: int) -> None:
        while count:
            count -= len(self._exactly(min(count, _PIECE_BYTES)))
