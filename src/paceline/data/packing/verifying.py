"""Is every byte of a packed dataset what it was when it was packed? What is not is named."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from paceline.data.image.packed import PackedDataset, open_packed
from paceline.data.image.packed_layout import FileFacts, Manifest
from paceline.data.packing.assembly import content_digest, index_arrays
from paceline.data.packing.processes import Progress

_SHOWN = 10


def verify(root: Path, workers: int, progress: Progress) -> list[str]:
    """Read everything back; return a sentence for each file that is damaged.

    Args:
        root: The directory of the packed dataset.
        workers: Files read at once.
        progress: Told how many bytes were read, and how many there are.

    Raises:
        DataError: If it cannot even be opened.
    """
    packed = open_packed(root, check_index=False)  # a damaged one is named below
    manifest, done = packed.manifest, 0
    found = []
    with ThreadPoolExecutor(workers) as pool:
        for facts, actual in zip(manifest.files, pool.map(lambda each: _hash(root, each), manifest.files), strict=True):
            done += facts.size
            progress(done, manifest.size_bytes)
            if actual != facts.sha256:
                found.append((facts, manifest.files.index(facts) - 1))
    if any(facts is manifest.index for facts, _ in found):
        # Without it nobody knows where an image lies.
        return [f"{root / facts.name} is damaged" for facts, _ in found]
    return [*_whole(root, manifest), *(_damage(packed, facts, shard) for facts, shard in found)]


def _whole(root: Path, manifest: Manifest) -> Iterator[str]:
    """See that the index says what the dataset is known by."""
    rows = index_arrays(root / manifest.index.name, manifest.columns)
    if content_digest(rows, manifest.classes, manifest.form, manifest.samples) != manifest.digest:
        yield f"{root / manifest.index.name} does not belong to this packed dataset"


def _hash(root: Path, facts: FileFacts) -> str:
    with open(root / facts.name, "rb") as file:
        if hasattr(os, "posix_fadvise"):
            # From the disk, not from what the system remembers of the file: it may just have been written.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(file, "sha256").hexdigest()


def _damage(packed: PackedDataset, facts: FileFacts, shard: int) -> str:
    """Say which images of a shard are not what they were."""
    index = packed.index
    rows = np.flatnonzero(index.places.file == shard).tolist()
    broken = [row for row in rows if hashlib.sha256(packed.content[row]).digest() != index.sha256[row].tobytes()]
    where = f"{packed.root / facts.name} is damaged"
    if not broken:
        return f"{where}, but none of its {len(rows):,} images is: its labels or names, or Arrow's own data, are"
    names = ", ".join(index.name[row] for row in broken[:_SHOWN])
    more = f" and {len(broken) - _SHOWN:,} more" if len(broken) > _SHOWN else ""
    return f"{where}: {len(broken):,} of its {len(rows):,} images ({names}{more})"
