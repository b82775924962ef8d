"""Pictures from files, folders, patterns, archives and standard input, in order."""

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
from typing import Any, Self

from paceline.data.image.dataset import SKIP_REASONS
from paceline.data.image.decode import BrokenImageError, read_file
from paceline.data.image.source import EXTENSIONS
from paceline.errors import DataError
from paceline.parsing.files import (
    SkippedItems,
    has_extension,
    is_ignored,
    is_ignored_member,
    list_files,
    refuse_archive,
    refuse_special_inputs,
    special_kind,
)

STANDARD_INPUT = "-"
LARGEST_FILE_BYTES = 256 * 2**20
"""Larger members of archives, or larger standard input, are not read: they are not pictures."""

OTHERS = "files without an image extension"
"""Why a file in a folder or an archive was skipped."""

_PATTERN = frozenset("*?[")


@dataclass(frozen=True)
class PictureFile:
    """A file that may be a picture.

    Attributes:
        path: Its name in predictions; for an archive member, the archive and the member's name.
        read: Returns its content, bytes or the words of a text, or raises BrokenImageError.
    """

    path: Path
    read: Callable[[], Any]

    @classmethod
    def at(cls, path: Path) -> PictureFile:
        """Return a file of the file system."""
        return cls(path, partial(_content_of, path))

    @classmethod
    def broken(cls, path: Path, reason: str) -> PictureFile:
        """Return a file already known to be unreadable."""

        def refuse() -> bytes:
            raise BrokenImageError(str(path), reason)

        return cls(path, refuse)


def is_image_name(name: str) -> bool:
    """Whether a file has an image extension."""
    return has_extension(name, EXTENSIONS)


def _why_not(name: str) -> str:
    """Explain why a file without an image extension is skipped."""
    return SKIP_REASONS["heic_images"] if has_extension(name, ("heic", "heif")) else OTHERS


def _content_of(path: Path) -> bytes:
    if kind := special_kind(path):
        raise BrokenImageError(str(path), f"it is {kind}, not a file")
    return read_file(path)


def pictures_of(sources: Sequence[Path], left_out: SkippedItems) -> Iterator[PictureFile]:
    """Yield the pictures in files, folders (recursive), patterns, archives and ``-``, in order.

    All sources are checked before the first picture is read; archives and lines of standard input are read only on
    demand.

    Args:
        sources: The files, folders, patterns and archives.
        left_out: Called for files that are not pictures; for archives, as far as they were read.

    Raises:
        DataError: If a source does not exist, contains no image, or is a pipe or a device.
    """
    pictures = [_opened(source, left_out) for source in sources]
    return itertools.chain.from_iterable(pictures)


def picture_from_standard_input() -> PictureFile:
    """Return the bytes of standard input as one picture."""

    def read() -> bytes:
        content = sys.stdin.buffer.read(LARGEST_FILE_BYTES + 1)
        if len(content) > LARGEST_FILE_BYTES:
            raise BrokenImageError(STANDARD_INPUT, f"more than {LARGEST_FILE_BYTES:,} bytes")
        return content

    return PictureFile(Path(STANDARD_INPUT), read)


def _opened(source: Path, left_out: SkippedItems) -> Iterable[PictureFile]:
    if str(source) == STANDARD_INPUT:
        names = (line.removeprefix(codecs.BOM_UTF8).rstrip(b"\r\n") for line in sys.stdin.buffer)
        files = (PictureFile.at(Path(os.fsdecode(name))) for name in names if name)
        first = next(files, None)
        if first is None:
            raise DataError("standard input (-) has no path; give one image path per line.")
        return itertools.chain([first], files)
    if is_archive(source) and source.is_file():
        return members(source, left_out)
    if source.is_dir():
        return _inside(source, left_out)
    if source.exists():
        refuse_special_inputs(source)
        refuse_archive(source)
        return [PictureFile.at(source)]
    check_exists(source)
    return _matching(str(source), left_out)


def check_exists(source: Path) -> None:
    """Refuse a source that is neither a file, a folder, a pattern nor standard input; raises DataError."""
    if not (source.exists() or _PATTERN & set(str(source)) or str(source) == STANDARD_INPUT):
        raise DataError(
            f"'{source}' does not exist; give image files, folders or archives of them, patterns in quotes, or - for "
            "paths from standard input; or files of lines, for weights that take those.",
            path=source,
        )


def _inside(folder: Path, left_out: SkippedItems) -> list[PictureFile]:
    inside = []
    for name in list_files(folder, left_out):
        if is_image_name(name):
            inside.append(folder / name)
        else:
            left_out.add(_why_not(name), str(folder / name))
    if not inside:
        raise DataError(
            f"'{folder}' contains no image; supported extensions: {', '.join(EXTENSIONS)}. Lines of text "
            f"or samples (.tsv, .txt, .jsonl) must be given file by file. {'. '.join(left_out.summaries())}".rstrip()
        )
    return [PictureFile.at(path) for path in sorted(inside)]


def _matching(pattern: str, left_out: SkippedItems) -> Iterable[PictureFile]:
    """Return the matches of a pattern, by name: images, and pictures in archives. Folders are not searched."""
    usable = []
    for path in map(Path, sorted(glob.glob(pattern, recursive=True))):
        if path.is_dir():
            if "**" not in pattern:  # matches folders on the way
                left_out.add("folders that a pattern matches, which are not searched", str(path))
        elif is_image_name(path.name) or is_archive(path):
            usable.append(path)
        elif not is_ignored(path.name):
            left_out.add(_why_not(path.name), str(path))
    if not usable:
        raise DataError(
            f"the pattern '{pattern}' matches no image; supported extensions: {', '.join(EXTENSIONS)}. "
            "** matches any folders in between."
        )
    return itertools.chain.from_iterable(
        members(path, left_out) if is_archive(path) else (PictureFile.at(path),) for path in usable
    )


_TARS = (".tar", ".tar.gz", ".tgz")
_SPECIAL = (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)
_NAMES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
_LONGEST_NAME_BYTES = 2**16
# Errors of archive readers for damaged files, and of zipfile (RuntimeError) for encrypted members and unsupported
# methods.
_DAMAGES = (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error)


def is_archive(path: Path) -> bool:
    """Whether a file name is that of a readable archive."""
    return path.name.lower().endswith((".zip", *_TARS))


def members(archive: Path, left_out: SkippedItems) -> Iterator[PictureFile]:
    """Yield the pictures in an archive, in its order; ``left_out`` is called for its other members.

    Unreadable members are yielded as unreadable pictures, and so is the rest of a damaged archive. Archives are not
    trusted: a member's size is limited whatever its header says, names that lead out of the archive are rejected, links
    are not followed, and a tar header cannot allocate more memory than a name needs.

    Raises:
        DataError: At the first picture, if the archive cannot be opened; at the end, if it contained no image.
    """
    refuse_special_inputs(archive)
    inside = _zipped(archive, left_out) if archive.name.lower().endswith(".zip") else _in_tar(archive, left_out)
    count = 0
    for picture in inside:
        count += 1
        yield picture
    if not count:
        raise DataError(f"'{archive}' contains no image; supported extensions: {', '.join(EXTENSIONS)}.", path=archive)


def _shown(archive: Path, name: str) -> Path:
    """Return a member's name for predictions, without control characters that a terminal would obey."""
    printable = name if name.isprintable() else ascii(name)[1:-1]
    return archive / printable.lstrip("/")


def _is_read(archive: Path, name: str, left_out: SkippedItems) -> bool:
    """Whether a member's name is that of a picture; reports other members, unless they are ignored."""
    if is_ignored_member(name) and not _is_outside(name):
        return False
    if not is_image_name(name):
        left_out.add(_why_not(name), str(_shown(archive, name)))
        return False
    return True


def _is_outside(name: str) -> bool:
    return name.startswith(("/", "\\")) or ".." in PurePosixPath(name.replace("\\", "/")).parts or "\0" in name


def _refusal(name: str, size: int) -> str | None:
    """Return why a member is not read, from its header."""
    if _is_outside(name):
        return "its name leads out of the archive"
    return f"{size:,} bytes; at most {LARGEST_FILE_BYTES:,} are read" if size > LARGEST_FILE_BYTES else None


def _zipped(archive: Path, left_out: SkippedItems) -> Iterator[PictureFile]:
    try:
        file = zipfile.ZipFile(archive)
    except _DAMAGES as error:
        raise DataError(f"'{archive}' cannot be read as a zip archive: {error}.", path=archive) from error
    lock = threading.Lock()

    def read(entry: zipfile.ZipInfo, path: Path) -> bytes:
        try:
            with lock, file.open(entry) as member:
                content = member.read(LARGEST_FILE_BYTES + 1)
        except _DAMAGES as error:
            raise BrokenImageError(str(path), f"cannot be read from its archive: {error}") from error
        if len(content) > LARGEST_FILE_BYTES:
            raise BrokenImageError(str(path), f"more than {LARGEST_FILE_BYTES:,} bytes")
        return content

    for entry in file.infolist():
        if entry.is_dir() or not _is_read(archive, entry.filename, left_out):
            continue
        path = _shown(archive, entry.filename)
        if (reason := _refusal(entry.filename, entry.file_size)) is not None:
            yield PictureFile.broken(path, reason)
        else:
            yield PictureFile(path, partial(read, entry, path))


class _Head(tarfile.TarInfo):
    """A tar header: tarfile mistakes a damaged one for the end, and reads names of any length into memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            head = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if not buf.strip(b"\0"):
                raise  # end of the archive
            raise tarfile.ReadError(str(error)) from error
        if head.size < 0:
            raise tarfile.ReadError("a member's size is negative")
        if head.type in _NAMES and head.size > _LONGEST_NAME_BYTES:
            raise tarfile.ReadError(f"a name of {head.size:,} bytes")
        return head

    def _refuse_holes(self, *_: Any) -> Self:
        raise tarfile.ReadError("a file with holes, of which it may name any number")

    # Methods that tarfile calls for such files, for each tar variant.
    _proc_sparse = _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse_holes


def _in_tar(archive: Path, left_out: SkippedItems) -> Iterator[PictureFile]:
    is_first = True
    opened = Path.open if archive.name.lower().endswith(".tar") else gzip.open
    try:
        # As a stream, read once from beginning to end, as a compressed archive requires.
        with opened(archive, "rb") as file, tarfile.open(fileobj=file, mode="r|", tarinfo=_Head) as tar:
            while (head := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # else it would remember all
                if not head.isreg():
                    if head.type in _SPECIAL and not is_ignored_member(head.name):
                        left_out.add("links and special files in archives", str(_shown(archive, head.name)))
                    continue
                if not _is_read(archive, head.name, left_out):
                    continue
                is_first, path = False, _shown(archive, head.name)
                if (reason := _refusal(head.name, head.size)) is not None:
                    yield PictureFile.broken(path, reason)
                    continue
                member = tar.extractfile(head)
                assert member is not None  # attribute as in a file
                yield PictureFile(path, partial(bytes, member.read()))
    except (tarfile.TarError, *_DAMAGES) as error:
        if is_first:
            raise DataError(f"'{archive}' cannot be read as a tar archive: {error}.", path=archive) from error
        yield PictureFile.broken(archive, f"the archive is damaged, what follows cannot be read: {error}")
