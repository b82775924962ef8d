"""What is an image called, wherever its data set lies? Draws that are to outlast changes go by that name."""

from __future__ import annotations

import hashlib
import os
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from paceline.data.image.source import SampleSource, SubsetSource

Hashes = NDArray[np.uint64]


class _Names(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> str | bytes: ...


@runtime_checkable
class _NamedSource(Protocol):
    """A source that knows what its images are called within the data set."""

    @property
    def names(self) -> _Names: ...


def sample_names(source: SampleSource) -> list[bytes]:
    """The name of every sample as UTF-8, without the place the data set lies at.

    Of images that share a name, the second is told from the first by ``#2`` after it, and so on.
    """
    found = [_name(source, sample) for sample in range(len(source))]
    if len(set(found)) == len(found):
        return found
    seen: dict[bytes, int] = {}
    for index, name in enumerate(found):
        seen[name] = count = seen.get(name, 0) + 1
        if count > 1:
            found[index] = b"%s#%d" % (name, count)
    return found


def hashed_names(names: list[bytes], salt: bytes) -> Hashes:
    """A fixed number from 0 to 2**64 - 1 for each name; another salt gives others."""
    joined = b"".join(hashlib.blake2b(name, digest_size=8, key=salt).digest() for name in names)
    return np.frombuffer(joined, dtype="<u8").astype(np.uint64)


def _name(source: SampleSource, sample: int) -> bytes:
    if isinstance(source, SubsetSource):
        return _name(source.base, int(source.ids[sample]))
    name = source.names[sample] if isinstance(source, _NamedSource) else source.path(sample)
    # Bytes that are no text are written out, as a packed dataset does it.
    text = os.fsdecode(name) if isinstance(name, bytes) else name
    return text.encode("utf-8", "backslashreplace")
