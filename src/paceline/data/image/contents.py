"""Digest what a set's image files hold, so that a resumed run notices other pixels under the same names and sizes.

Sets of up to ``MOST_IMAGES`` images and ``LARGEST_BYTES`` are read once before the first run. The digest is remembered
in the user's cache for as long as every file has the size, times and inode that it had. Larger sets are not read: their
names and sizes are what a run compares.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from paceline.data.image.dataset import ImageDataset
from paceline.data.image.source import BrokenImageError, Content, encoded_source, files_of
from paceline.data.remembered import remember
from paceline.machine import cache_folder
from paceline.units import format_bytes

MOST_IMAGES = 20_000
LARGEST_BYTES = 512 * 2**20
TOO_LARGE = (
    f"none: more than {MOST_IMAGES:,} images or {format_bytes(LARGEST_BYTES)}; a resume compares names and sizes"
)
_UNREADABLE = "none, since {!r} cannot be read: a resume compares names and sizes"
_READERS = 8  # each waits for the disk most of the time
_AT_ONCE = 64
# Times have steps, of two seconds on the coarsest file systems: what changed so lately may change again unseen.
_TOO_FRESH_NS = 3_000_000_000


def content_of(dataset: ImageDataset) -> tuple[str | None, str]:
    """Digest the image files of all splits, as :func:`content_digest`; nothing is said where there are no files."""
    splits = [each for each in (dataset.train, dataset.validation, dataset.holdout) if each is not None]
    sources = [each for each in map(encoded_source, splits) if each is not None]
    if len(sources) < len(splits) or any(files_of(each, np.arange(0)) is None for each in splits):
        return None, ""
    if sum(map(len, splits)) > MOST_IMAGES:
        return None, TOO_LARGE
    paths = {path for each in splits for path in files_of(each, np.arange(len(each))) or ()}
    samples = [(source, sample) for source in sources for sample in range(len(source))]

    def read(at: int) -> Content:
        source, sample = samples[at]
        return source.encoded(sample)

    return content_digest(sorted(paths), len(samples), read, dataset.digest)


def content_digest(
    paths: Sequence[str], count: int, read: Callable[[int], Content], which: str
) -> tuple[str | None, str]:
    """Digest images in their order, or recall the digest if no file has changed.

    Args:
        paths: The files that they lie in.
        count: How many there are.
        read: Returns the content of one, or raises BrokenImageError.
        which: Says which images of these files they are.

    Returns:
        Hexadecimal, and what it is of, for people; None and why, if the files are too large, or one cannot be read.
    """
    now = time.time_ns()
    try:
        with ThreadPoolExecutor(_READERS) as pool:
            stamps = list(pool.map(_stamp, paths))
    except OSError as error:
        return None, _UNREADABLE.format(error.filename)
    if sum(size for size, *_ in stamps) > LARGEST_BYTES:
        return None, TOO_LARGE
    changes = ((max(times), path) for (_, _, *times), path in zip(stamps, paths, strict=True))
    newest, last = max(changes, default=(0, ""))
    told = f"of {count:,} images; {last!r} changed last"
    memory = cache_folder() / "contents" / _hashed("\0".join([which, *paths]).encode("utf-8", "surrogateescape")).hex()
    state = _hashed(repr(stamps).encode()).hex()
    known = _recall(memory, state)
    if known is not None:
        return known, told

    def hashes(first: int) -> bytes:
        return b"".join(_hashed(read(at)) for at in range(first, min(first + _AT_ONCE, count)))

    try:
        with ThreadPoolExecutor(_READERS) as pool:
            digest = _hashed(b"".join(pool.map(hashes, range(0, count, _AT_ONCE)))).hex()
    except BrokenImageError as error:
        return None, _UNREADABLE.format(error.path)
    if newest < now - _TOO_FRESH_NS:
        remember(memory, f"{state} {digest}".encode())
    return digest, told


def _stamp(path: str) -> tuple[int, int, int, int]:
    """A file's size, inode, and times of writing and change; raises OSError."""
    found = os.stat(path)
    return found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def _recall(memory: os.PathLike[str], state: str) -> str | None:
    try:
        with open(memory, encoding="ascii") as file:
            before, digest = file.read().split(" ")
    except (OSError, ValueError):
        return None
    return digest if before == state and len(digest) == len(state) else None


def _hashed(content: Content) -> bytes:
    return hashlib.blake2b(content, digest_size=32).digest()
