"""Where in a .tar file does each member lie? Read once from the heads of the members, and remembered.

Read are the formats that are in use: ustar, GNU's long names and the extended heads of POSIX 2001 (pax). A tar that is
compressed as a whole has no places to go to, and is refused.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.data.image.mapped import MappedFile, Names
from paceline.data.image.source import Ids
from paceline.data.remembered import Arrays, recall_arrays, remember_arrays
from paceline.errors import DataError
from paceline.machine import cache_folder

_BLOCK = 512
_REGULAR = (b"0", b"\0", b"7")
_SPECIAL = (b"1", b"2", b"3", b"4", b"6")  # links, devices, named pipes
_LONG_NAME, _EXTENDED = b"L", b"x"
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
    recalled = _recall(memory)
    if recalled is not None:
        return recalled
    index = _scan(file)
    arrays: Arrays = {"blob": index.names.blob, "ends": index.names.ends, "begin": index.begin, "length": index.length}
    arrays |= {"special_blob": index.special.blob, "special_ends": index.special.ends}
    remember_arrays(memory, arrays)
    return index


def memory_of(file: MappedFile, what: str) -> Path:
    """Where something about a tar is remembered, as long as it is as it is now: written to again, it is another."""
    text = f"{_VERSION}\0{os.path.realpath(file.path)}\0{file.size}\0{file.changed}"
    key = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]
    return cache_folder() / "indexes" / f"{what}-{key}.npz"


def _scan(file: MappedFile) -> TarIndex:
    if file.size == 0:
        raise _damaged(file.path, "it is empty")
    names: list[str] = []
    special: list[str] = []
    places: list[tuple[int, int]] = []
    with open(file.path, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for magic, name in _COMPRESSED.items():
            if content[: len(magic)] == magic:
                raise DataError(
                    f"{file.path!r} is compressed with {name}, so that no image in it can be read by itself: "
                    "decompress it (the images in it are compressed already)."
                )
        for name, begin, length in _members(content, file.path):
            if length is None:
                special.append(name)
            else:
                names.append(name)
                places.append((begin, length))
    table = np.array(places, dtype=np.int64).reshape(-1, 2)
    return TarIndex(
        names=Names.of(names), begin=table[:, 0].copy(), length=table[:, 1].copy(), special=Names.of(special)
    )


def _members(content: mmap.mmap, path: str) -> Iterator[tuple[str, int, int | None]]:
    """Yield (name, first byte, length) of each regular file, and None as the length of what is special."""
    position = 0
    said: dict[str, str] = {}
    while position + _BLOCK <= len(content):
        head = content[position : position + _BLOCK]
        if head.count(0) == _BLOCK:
            return
        _check_sum(head, path, position)
        kind, begin = head[156:157], position + _BLOCK
        length = int(said["size"]) if "size" in said and kind in _REGULAR else _number(head[124:136])
        if length < 0 or begin + length > len(content):
            raise _damaged(path, f"its member at byte {position} reaches beyond the end")
        position = begin + -(-length // _BLOCK) * _BLOCK
        if kind == _LONG_NAME:
            said["path"] = content[begin : begin + length].rstrip(b"\0").decode("utf-8", "backslashreplace")
        elif kind == _EXTENDED:
            said |= _extended(content[begin : begin + length])
        else:
            if kind in _REGULAR or kind in _SPECIAL:
                yield said.get("path") or _name(head), begin, length if kind in _REGULAR else None
            said = {}
    if content[position:].strip(b"\0"):
        raise _damaged(path, f"at byte {position} it breaks off")


def _check_sum(head: bytes, path: str, position: int) -> None:
    try:
        said = int(head[148:156].strip(b" \0") or b"-1", 8)
    except ValueError:
        said = -1
    # The field itself counts as eight spaces.
    if sum(head) - sum(head[148:156]) + 8 * 32 != said:
        raise _damaged(path, f"at byte {position} is no head of a member")


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # GNU's way of writing sizes from 8 GiB on
        return int.from_bytes(field[1:], "big")
    try:
        return int(field.strip(b" \0") or b"0", 8)
    except ValueError:
        return -1


def _name(head: bytes) -> str:
    name = head[:100].partition(b"\0")[0]
    prefix = head[345:500].partition(b"\0")[0] if head[257:263] == b"ustar\0" else b""
    return (prefix + b"/" + name if prefix else name).decode("utf-8", "backslashreplace")


def _extended(records: bytes) -> dict[str, str]:
    """Read ``<length> <key>=<value>\\n`` records; only path and size matter here."""
    found = {}
    while records:
        length, _, _ = records.partition(b" ")
        if not length.isdigit() or not 0 < int(length) <= len(records):
            break
        key, _, value = records[len(length) + 1 : int(length) - 1].partition(b"=")
        if key == b"path" or (key == b"size" and value.isdigit()):
            found[key.decode()] = value.decode("utf-8", "backslashreplace")
        records = records[int(length) :]
    return found


def _recall(path: Path) -> TarIndex | None:
    arrays = recall_arrays(path)
    try:
        if arrays is not None:
            return TarIndex(
                names=Names(arrays["blob"], arrays["ends"]),
                begin=arrays["begin"],
                length=arrays["length"],
                special=Names(arrays["special_blob"], arrays["special_ends"]),
            )
    except KeyError:
        pass  # of another version
    return None


def _damaged(path: str, reason: str) -> DataError:
    return DataError(f"{path!r} cannot be read as a .tar ({reason}): copy or make it again.")
