"""Index of a .tar file: where each member lies, read once from the heads of the members, and remembered.

A tar that is compressed as a whole has no places to go to, and is refused.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.data.image.mapped import MappedFile, Names
from paceline.data.image.source import Ids
from paceline.data.remembered import Arrays, recall_arrays, remember_arrays
from paceline.errors import DataError
from paceline.machine import cache_folder

_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7z": "xz", b"(\xb5/": "zstd"}
# Another number is another layout of the remembered file.
_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class TarIndex:
    """The regular files in a tar, in its order.

    Attributes:
        names: Their paths.
        begin: First byte of each file's content, int64 [N].
        length: Its length, int64 [N].
        special: Paths of links, devices and pipes, which are not read.
    """

    names: Names
    begin: Ids
    length: Ids
    special: Names


def index_tar(file: MappedFile) -> TarIndex:
    """Find the members of a tar, or recall them from an earlier time.

    Raises:
        DataError: If it is compressed, truncated or no tar.
    """
    memory = memory_of(file, "tar")
    arrays = recall_arrays(memory)
    if arrays is None or not {"blob", "ends", "begin", "length", "special_blob", "special_ends"} <= arrays.keys():
        arrays = _scan(file)
        remember_arrays(memory, arrays)
    return TarIndex(
        names=Names(arrays["blob"], arrays["ends"]),
        begin=arrays["begin"],
        length=arrays["length"],
        special=Names(arrays["special_blob"], arrays["special_ends"]),
    )


def memory_of(file: MappedFile, what: str) -> Path:
    """Where something about a tar is remembered, as long as it is as it is now: written to again, it is another."""
    text = f"{_VERSION}\0{os.path.realpath(file.path)}\0{file.size}\0{file.changed}"
    key = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]
    return cache_folder() / "indexes" / f"{what}-{key}.npz"


def _scan(file: MappedFile) -> Arrays:
    if file.size == 0:
        raise _damaged(file, "it is empty")
    with open(file.path, "rb") as opened:
        head = opened.read(tarfile.BLOCKSIZE)
        for magic, name in _COMPRESSED.items():
            if head.startswith(magic):
                raise DataError(
                    f"{file.path!r} is compressed with {name}, so that no image in it can be read by itself: "
                    "decompress it (the images in it are compressed already)."
                )
        names, special = list[str](), list[str]()
        places: list[tuple[int, int]] = []
        end = 0
        if head.strip(b"\0"):  # a tar without members is zeros alone
            opened.seek(0)
            try:
                with tarfile.open(fileobj=opened, mode="r:", encoding="utf-8", errors="backslashreplace") as archive:
                    for member in _members(archive, file):
                        if member.isreg() and not member.issparse():
                            names.append(member.name)
                            places.append((member.offset_data, member.size))
                        else:
                            special.append(member.name)
                    end = archive.offset
            except (tarfile.TarError, ValueError, OverflowError) as error:
                raise _damaged(file, error) from error
        # tarfile takes a damaged head for the end.
        opened.seek(end)
        rest = opened.read(tarfile.BLOCKSIZE)
        if rest.strip(b"\0"):
            is_whole = len(rest) == tarfile.BLOCKSIZE
            raise _damaged(file, f"at byte {end} {'is no head of a member' if is_whole else 'it breaks off'}")
    found, odd = Names.of(names), Names.of(special)
    table = np.array(places, dtype=np.int64).reshape(-1, 2)
    arrays: Arrays = {"blob": found.blob, "ends": found.ends, "begin": table[:, 0].copy(), "length": table[:, 1].copy()}
    return arrays | {"special_blob": odd.blob, "special_ends": odd.ends}


def _members(archive: tarfile.TarFile, file: MappedFile) -> Iterator[tarfile.TarInfo]:
    """The members of a tar but for its folders; none of them is kept in memory."""
    while (member := archive.next()) is not None:
        archive.members.clear()  # type: ignore[attr-defined]  # or the head of each would stay
        if member.size < 0 or (member.isreg() and member.offset_data + member.size > file.size):
            raise _damaged(file, f"its member at byte {member.offset} reaches beyond the end")
        if not member.isdir():
            yield member


def _damaged(file: MappedFile, reason: object) -> DataError:
    return DataError(f"{file.path!r} cannot be read as a .tar ({reason}): copy or make it again.")
