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
from paceline.data.image.source import BrokenImageError, Content, EncodedSource, encoded_source, files_of
from paceline.data.remembered import remember
from paceline.machine import cache_folder

MOST_IMAGES = 20_000
LARGEST_BYTES = 512 * 2**20
_READERS = 8  # each waits for the disk most of the time
_AT_ONCE = 64
# Times have steps, of two seconds on the coarsest file systems: what changed so lately may change again unseen.
_TOO_FRESH_NS = 3_000_000_000


def content_of(dataset: ImageDataset) -> str | None:
    """Digest the image files of all splits; None if there are none, they are too many, or one cannot be read."""
    splits = [each for each in (dataset.train, dataset.validation, dataset.holdout) if each is not None]
    if sum(map(len, splits)) > MOST_IMAGES:
        return None
    paths: set[str] = set()
    samples: list[tuple[EncodedSource, int]] = []
    for split in splits:
        source, files = encoded_source(split), files_of(split, np.arange(len(split)))
        if source is None or files is None:
            return None
        paths.update(files)
        samples += [(source, sample) for sample in range(len(split))]

    def read(at: int) -> Content:
        source, sample = samples[at]
        return source.encoded(sample)

    return content_digest(sorted(paths), len(samples), read, dataset.digest)


def content_digest(paths: Sequence[str], count: int, read: Callable[[int], Content], which: str) -> str | None:
    """Digest images in their order, or recall the digest if no file has changed.

    Args:
        paths: The files that they lie in.
        count: How many there are.
        read: Returns the content of one, or raises BrokenImageError.
        which: Says which images of these files they are.

    Returns:
        Hexadecimal; None if the images or their files are too many or too large, or one cannot be read.
    """
    now = time.time_ns()
    stamps = None if count > MOST_IMAGES else _stamps(paths)
    if stamps is None or sum(size for size, *_ in stamps) > LARGEST_BYTES:
        return None
    memory = cache_folder() / "contents" / _hashed("\0".join([which, *paths]).encode("utf-8", "surrogateescape")).hex()
    state = _hashed(repr(stamps).encode()).hex()
    known = _recall(memory, state)
    if known is not None:
        return known

    def hashes(first: int) -> bytes:
        return b"".join(_hashed(read(at)) for at in range(first, min(first + _AT_ONCE, count)))

    try:
        with ThreadPoolExecutor(_READERS) as pool:
            digest = _hashed(b"".join(pool.map(hashes, range(0, count, _AT_ONCE)))).hex()
    except BrokenImageError:
        return None
    newest = max((max(changed) for _, _, *changed in stamps), default=0)
    if newest < now - _TOO_FRESH_NS and _stamps(paths) == stamps:
        remember(memory, f"{state} {digest}".encode())
    return digest


def _stamps(paths: Sequence[str]) -> list[tuple[int, int, int, int]] | None:
    """Size, inode, and times of writing and change of each file; None if one is not there."""
    try:
        found = [os.stat(path) for path in paths]
    except OSError:
        return None
    return [(each.st_size, each.st_ino, each.st_mtime_ns, each.st_ctime_ns) for each in found]


def _recall(memory: os.PathLike[str], state: str) -> str | None:
    try:
        with open(memory, encoding="ascii") as file:
            before, digest = file.read().split(" ")
    except (OSError, ValueError):
        return None
    return digest if before == state and len(digest) == len(state) else None


def _hashed(content: Content) -> bytes:
    return hashlib.blake2b(content, digest_size=32).digest()
