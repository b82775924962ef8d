"""Rules for which files of a folder or an archive are read: the same for images, texts, tables, archives and predict.

Names that begin with a dot and files of the operating system are ignored. Linked folders are followed. File extensions
are not case-sensitive. Everything else that is not used is counted and reported. Cache files are written here too.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from paceline.errors import RunDirectoryError, data_error

_SYSTEM = frozenset({"thumbs.db", "ehthumbs.db", "desktop.ini", "__macosx"})
LFS_START = b"version https://git-lfs"
"""How the small text begins that stands for a file which Git LFS keeps elsewhere."""
LFS_POINTER = "a Git LFS pointer, not the file itself: run `git lfs pull` where it was cloned"
_ARCHIVE = re.compile(r"\.(zip|7z|rar|tar|tgz|tbz2?|txz|gz|bz2|xz|zst)$")
PACKED = (b"PK\3\4", b"\x1f\x8b", b"7z\xbc\xaf", b"Rar!", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")  # first bytes
_TEXTS = ("csv", "tsv", "tab", "jsonl", "json", "txt", "yaml", "xlsx", "xls")  # the last two are often taken for such
# With the bytes that no text has: a column may be called PAR1.
_BINARY = {
    b"PAR1\x15": "a parquet file: let its name end in .parquet",
    b"ARROW1\0": "an Arrow file: write it as parquet or CSV",
    b"SQLite format 3\0": "an SQLite database: export the table as CSV",
    b"\x89HDF\r\n": "an HDF5 file: write it as parquet or CSV",
    b"\x80": "a pickle: write it as parquet or CSV",
    b"\x93NUMPY": "a NumPy array: write it as CSV",
    b"\xd0\xcf\x11\xe0": "an Excel file (.xls): export it as CSV",
    b"%PDF": "a PDF document: export it as text",
    **dict.fromkeys(PACKED, "an archive or a spreadsheet: unpack or export it"),
}
"""What a file called a text is, and what to do, by its first bytes."""
_WEB_PAGE = (b"<!doctyp", b"<html")
TOO_FRESH_NS = 3_000_000_000
"""Timestamps have a resolution of up to two seconds: a recently changed file may change again unnoticed."""
_MAX_NAMES, _MAX_EXTENSION_LENGTH, _MAX_EXTENSIONS = 3, 10, 1000
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def is_ignored(name: str) -> bool:
    """Whether a file or folder is ignored because of its name: hidden, or created by the operating system."""
    return (name.startswith(".") and name not in (".", "..")) or name.lower() in _SYSTEM


def is_ignored_member(path: str) -> bool:
    """Whether a member of an archive is ignored because of its name, or that of a folder it is in."""
    return any(map(is_ignored, path.split("/")))


def has_extension(name: str, extensions: Iterable[str]) -> bool:
    """Whether a name has one of some extensions, given in lower case and without the dot."""
    _, dot, extension = name.rpartition(".")
    return bool(dot) and extension.lower() in extensions


def special_kind(path: str | Path) -> str | None:
    """Return what kind of object a path is if it is not a regular file; None for a regular or missing file.

    Opening a named pipe would wait for a writer, perhaps forever.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return None
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "a special file")


def refuse_special_inputs(path: str | Path) -> None:
    """Refuse anything but a regular file before opening it; also refuse the Git LFS pointer of a missing file.

    Raises:
        DataError: If it is a folder, a named pipe, a socket, a device or a Git LFS pointer.
    """
    if kind := special_kind(path):
        raise data_error(path, f"is {kind}, not a file: remove it, or correct the path.")
    with contextlib.suppress(OSError), open(path, "rb") as file:  # its reader reports what cannot be read
        if file.read(len(LFS_START)) == LFS_START:
            raise data_error(path, f"is {LFS_POINTER}.")


def refuse_archive(path: str | Path) -> None:
    """Refuse an archive, by its name or its first bytes, where a folder or text is expected, and other binary files.

    Raises:
        DataError: If it is one.
    """
    name = os.fspath(path).lower()
    if _ARCHIVE.search(name) and os.path.isfile(path):
        tar = " A tar of WebDataset samples is read in place, with data.dataset=webdataset." * name.endswith(".tar")
        raise data_error(path, f"is an archive: unpack it, and give the folder or file in it.{tar}")
    if has_extension(name, _TEXTS) and os.path.isfile(path):
        begin = b""
        with contextlib.suppress(OSError), open(path, "rb") as file:  # whoever reads it explains the error
            begin = file.read(16)
        kind = next((kind for first, kind in _BINARY.items() if begin.startswith(first)), None)
        if begin.lower().startswith(_WEB_PAGE) and not name.endswith(".txt"):
            kind = "a web page: download the file itself"
        if kind:
            raise data_error(path, f"is not what its name says, but {kind}.")


def free_name(path: Path) -> Path:
    """Return a path to which nothing was renamed before: with a number at its end if it is taken."""
    numbered = (path.with_name(f"{path.name}-{count}") for count in itertools.count(2))
    return next(each for each in itertools.chain([path], numbered) if not os.path.lexists(each))


def refuse_special_outputs(*paths: Path) -> None:
    """Refuse to write to anything but a regular file: a rename would replace it, and opening a named pipe would wait.

    Raises:
        RunDirectoryError: If one is a folder, a link, a named pipe, a socket or a device; a missing file is fine.
    """
    for path in paths:
        kind = "a link" if path.is_symlink() else special_kind(path)
        if kind:
            raise RunDirectoryError(f"'{path}' is {kind}, not a file, and is not replaced: give another name.")


class SkippedItems:
    """Counts unused files by reason, and keeps the first names of each."""

    def __init__(self) -> None:
        self._extensions: dict[str, Counter[str]] = {}
        self._first: dict[str, list[str]] = {}

    def add(self, reason: str, name: str, detail: str = "") -> None:
        """Count a file, folder, member or row; the reason is a plural noun ("files with other endings")."""
        extensions, first = self._extensions.setdefault(reason, Counter()), self._first.setdefault(reason, [])
        _, dot, extension = name.rpartition(".")
        # Names of archive members are arbitrary: neither long extensions nor many of them are kept.
        is_kept = (
            dot
            and "/" not in extension
            and len(extension) <= _MAX_EXTENSION_LENGTH
            and len(extensions) < _MAX_EXTENSIONS
        )
        extensions[f".{extension.lower()}" if is_kept else ""] += 1
        if len(first) < _MAX_NAMES:
            first.append(f"{name!r} ({detail})" if detail else repr(name))

    def summaries(self) -> tuple[str, ...]:
        """Return one sentence for each reason, with the number of files left out."""
        return self.counts(" left out")

    def counts(self, verb: str = "") -> tuple[str, ...]:
        """Return one line for each reason, with the number of files."""
        return tuple(self._summary(reason, verb) for reason in self._extensions)

    def _summary(self, reason: str, verb: str) -> str:
        extensions, first = self._extensions[reason], self._first[reason]
        total = extensions.total()
        parts = [f"{count:,} {extension}" for extension, count in extensions.most_common(_MAX_NAMES) if extension]
        by_extension = f"{', '.join(parts)}; " if len(extensions) > 1 and parts else ""
        names = ", ".join(first) + (", …" if total > len(first) else "")
        return f"{reason}: {total:,}{verb} ({by_extension}{names})"


def remember(path: Path, content: bytes) -> bool:
    """Write a cache file atomically; return False if that fails, for example because the disk is full."""
    import tempfile  # slow to import, and rarely needed

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A name that no other process uses, on this host or another.
        descriptor, partial = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
    except OSError:
        return False
    return True


def list_entries(folder: str | Path) -> list[os.DirEntry[str]]:
    """Return all entries of a folder.

    Raises:
        DataError: If it cannot be listed.
    """
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise data_error(
            folder,
            f"cannot be listed ({error.strerror}): give this user read permission (chmod a+rx), or move it away.",
        ) from None


def visible_entries(folder: str | Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder that are not ignored; raises DataError if it cannot be listed."""
    return [entry for entry in list_entries(folder) if not is_ignored(entry.name)]


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder, or a link to one; a link to itself is not."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def list_files(root: str | Path, skipped: SkippedItems) -> list[str]:
    """Return the sorted relative paths of all files below a folder that are not ignored.

    Linked folders are followed, each folder once: a link to one that was already read, or that contains ``root``, is
    left out, so that cyclic links terminate.

    Raises:
        DataError: If a folder cannot be listed.
    """
    real_root = os.path.realpath(root)
    seen = {_identity(each) for each in (real_root, *map(str, Path(real_root).parents))}
    paths: list[str] = []
    folders, links = [""], list[str]()
    while folders or links:
        if not folders:  # links come after all folders that are inside themselves
            links.sort(reverse=True)
        folder = (folders or links).pop()
        identity = _identity(os.path.join(root, folder))
        if folder and identity in seen:
            skipped.add("links to folders that are already read", folder)
            continue
        seen.add(identity)
        for entry in visible_entries(os.path.join(root, folder)):
            path = os.path.join(folder, entry.name)
            if not is_folder(entry):
                paths.append(path)
            else:
                (links if entry.is_symlink() else folders).append(path)
    return sorted(paths)


def _identity(folder: str) -> tuple[int, int]:
    try:
        status = os.stat(folder)
    except OSError:  # listing it reports the problem
        return (0, 0)
    return status.st_dev, status.st_ino
