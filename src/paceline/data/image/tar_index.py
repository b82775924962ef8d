"""Where the members of a tar lie, read once from their headers, and cached."""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from paceline.data.disk_cache import recall_arrays, remember_arrays
from paceline.data.image.mapped import MappedFile
from paceline.data.image.source import Ids, NameArray
from paceline.errors import DataError, data_error
from paceline.host.machine import cache_folder
from paceline.parsing.files import has_extension

_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7z": "xz", b"(\xb5/": "zstd"}
# Changes with the layout of the cached file.
_VERSION = 3
_PARTS = ("blob", "ends")


@dataclass(frozen=True, kw_only=True)
class TarIndex:
    """The regular files in a tar, in order.

    Attributes:
        names: Their paths.
        begin: Offset of each file's content, int64 [N].
        length: Its length in bytes, int64 [N].
        labels: Content of ``.cls`` and ``.json`` files; empty for others.
        special: Paths of links, devices and pipes, which are not read.
    """

    names: NameArray
    begin: Ids
    length: Ids
    labels: NameArray
    special: NameArray


def index_tar(file: MappedFile) -> TarIndex:
    """Find the members of a tar, or read them from the cache.

    Raises:
        DataError: If it is compressed, truncated or not a tar.
    """
    # The cache is valid while the tar is unchanged.
    text = f"{_VERSION}\0{os.path.realpath(file.path)}\0{file.size}\0{file.changed}"
    key = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]
    memory = cache_folder() / "indexes" / f"tar-{key}.npz"
    arrays = recall_arrays(memory)
    named = ("names", "labels", "special")
    if arrays is None:
        names, ranges, labels, special = _scan(file)
        table = np.array(ranges, dtype=np.int64).reshape(-1, 2)
        arrays = {"begin": table[:, 0].copy(), "length": table[:, 1].copy()}
        for name, texts in (("names", names), ("labels", labels), ("special", special)):
            joined = NameArray.of(texts)
            arrays |= {f"{name}_blob": joined.blob, f"{name}_ends": joined.ends}
        remember_arrays(memory, arrays)
    columns = (NameArray(*(arrays[f"{name}_{of}"] for of in _PARTS)) for name in named)
    return TarIndex(begin=arrays["begin"], length=arrays["length"], **dict(zip(named, columns, strict=True)))


def _scan(file: MappedFile) -> tuple[list[str], list[tuple[int, int]], list[bytes], list[str]]:
    """Return names, positions and labels of the regular files, and names of the others."""
    if file.size == 0:
        raise _damaged(file, "it is empty")
    with open(file.path, "rb") as stream:
        head = stream.read(tarfile.BLOCKSIZE)
        for magic, name in _COMPRESSED.items():
            if head.startswith(magic):
                raise data_error(
                    file.path,
                    f"is compressed with {name}, so single samples cannot be read from it: decompress it (images in it "
                    "are compressed already).",
                )
        names, special, labels = list[str](), list[str](), list[bytes]()
        ranges: list[tuple[int, int]] = []
        end = 0
        if head.strip(b"\0"):  # a tar without members contains only zeros
            stream.seek(0)
            try:
                with tarfile.open(fileobj=stream, mode="r:", encoding="utf-8", errors="backslashreplace") as archive:
                    for member in _members(archive, file):
                        if member.isreg() and not member.issparse():
                            names.append(member.name)
                            ranges.append((member.offset_data, member.size))
                            content = (
                                archive.extractfile(member) if has_extension(member.name, ("cls", "json")) else None
                            )
                            labels.append(b"" if content is None else content.read())
                        else:
                            special.append(member.name)
                    end = archive.offset
            except (tarfile.TarError, ValueError, OverflowError) as error:
                raise _damaged(file, error) from error
        # tarfile mistakes a damaged header for the end.
        stream.seek(end)
        rest = stream.read(tarfile.BLOCKSIZE)
        if rest.strip(b"\0"):
            is_whole = len(rest) == tarfile.BLOCKSIZE
            raise _damaged(file, f"at byte {end} {'is not a member header' if is_whole else 'it is truncated'}")
    return names, ranges, labels, special


def _members(archive: tarfile.TarFile, file: MappedFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a tar except folders, without keeping them in memory."""
    while (member := archive.next()) is not None:
        archive.members.clear()  # type: ignore[attr-defined]  # it keeps the head of each member
        if member.size < 0 or (member.isreg() and member.offset_data + member.size > file.size):
            raise _damaged(file, f"its member at byte {member.offset} extends beyond the end")
        if not member.isdir():
            yield member


def _damaged(file: MappedFile, reason: object) -> DataError:
    return data_error(file.path, f"cannot be read as a .tar ({reason}): copy or create it again.")
