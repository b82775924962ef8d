"""The first batch, read in parts by all loader processes before any of them reads another.

Each loader process reads a whole micro-batch. Left to that, the first comes when one process has read all of it alone,
and on few cores not before the others have read theirs as well.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, fields, replace

import numpy as np

from paceline.data.batch import Batch
from paceline.data.nested import joined_along_samples, tensors_in
from paceline.data.slices import SampleSlice


@dataclass(frozen=True, kw_only=True)
class PartOfSlice(SampleSlice):
    """Some of a slice's samples, that follow one another.

    Attributes:
        whole: The slice.
        completes: Whether it is the last part.
    """

    whole: SampleSlice
    completes: bool


def first_in_parts(slices: Iterable[SampleSlice], parts: int) -> Iterator[SampleSlice]:
    """The slices, the first of them in as many parts as can have a sample, but no more than ``parts``."""
    for number, piece in enumerate(slices):
        count = min(parts, len(piece.ids))
        if number > 0 or count < 2:
            yield piece
            continue
        same = {each.name: getattr(piece, each.name) for each in fields(piece) if each.name != "ids"}
        for part, ids in enumerate(np.array_split(piece.ids, count)):
            yield PartOfSlice(**same, ids=ids, whole=piece, completes=part == count - 1)


def joined(batches: Iterable[Batch]) -> Generator[Batch, None, None]:
    """The batches, parts of one slice put together: the same bits as if it had been read whole."""
    waiting: list[Batch] = []
    for batch in batches:
        part = batch.slice
        if not isinstance(part, PartOfSlice):
            yield batch
            continue
        waiting.append(batch)
        if part.completes:
            yield _join(waiting, part.whole)
            waiting = []


def _join(parts: list[Batch], whole: SampleSlice) -> Batch:
    batch = replace(
        parts[0],
        inputs=joined_along_samples([part.inputs for part in parts]),
        targets=joined_along_samples([part.targets for part in parts]),
        ids=np.concatenate([part.ids for part in parts]),
        slice=whole,
        broken=tuple(broken for part in parts for broken in part.broken),
    )
    is_pinned = any(tensor.is_pinned() for tensor in tensors_in(parts[0].inputs))
    return batch.pin_memory() if is_pinned else batch
