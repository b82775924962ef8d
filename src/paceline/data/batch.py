"""One micro-batch: nested tensors, their slice of samples, and the interface of a back-end.

A batch's tensors have its samples along their first axis; its lists have an entry for each sample (pictures of unequal
shapes, for example). Tuples and dicts hold parts that are such tensors or lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.data.slices import SampleIds, SampleSlice

Nested = Any
"""A tensor, or a tuple, list or dict (by name) of nested ones; values that are not tensors stay unchanged."""


def mapped(function: Callable[[Tensor], Any], value: Nested) -> Nested:
    """The same structure with ``function`` applied to each tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: mapped(function, each) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple takes its fields one by one
        return type(value)(*(mapped(function, each) for each in value))
    if isinstance(value, list | tuple):
        return type(value)(mapped(function, each) for each in value)
    return value


def tensors_in(*values: Nested) -> Iterator[Tensor]:
    """Every tensor, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from tensors_in(*value.values())
        elif isinstance(value, list | tuple):
            yield from tensors_in(*value)


def rows_of(value: Nested) -> int | None:
    """Samples in a batch's inputs: the length of its first tensor or list; None where there is none."""
    if isinstance(value, Tensor):
        return len(value) if value.ndim else None
    if isinstance(value, list):
        return len(value)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
    return next((rows for rows in map(rows_of, parts) if rows is not None), None)


def copied(value: Nested) -> Nested:
    """The same with copies of its tensors."""
    return mapped(lambda tensor: tensor.clone(), value)


def chosen(value: Nested, rows: Sequence[int], *, of: int) -> Nested:
    """Some samples of a batch's inputs or targets, in another order if need be.

    Args:
        value: A value for the whole batch.
        rows: Which of its samples, each as often as it is named.
        of: How many the batch has. Values with another number of entries belong to no sample, and stay.
    """
    if isinstance(value, Tensor):
        if not value.ndim or len(value) != of:
            return value
        found = value.index_select(0, torch.as_tensor(rows, dtype=torch.int64, device=value.device))
        is_last = value.ndim == 4 and value.is_contiguous(memory_format=torch.channels_last)
        return found.contiguous(memory_format=torch.channels_last) if is_last else found
    if isinstance(value, dict):
        return {key: chosen(each, rows, of=of) for key, each in value.items()}
    if isinstance(value, list):
        return [value[row] for row in rows] if len(value) == of else value
    if isinstance(value, tuple):
        parts = (chosen(each, rows, of=of) for each in value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def joined_along_samples(parts: list[Nested]) -> Nested:
    """Parts of a batch put together: tensors along their first axis, lists one after the other.

    Args:
        parts: Of the same structure, at least one.

    Raises:
        RuntimeError: If tensors differ along other axes: padded to unequal lengths, say.
    """
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts)
    if isinstance(first, dict):
        return {key: joined_along_samples([each[key] for each in parts]) for key in first}
    if isinstance(first, list):
        return [item for each in parts for item in each]
    if isinstance(first, tuple):
        joined = (joined_along_samples([each[index] for each in parts]) for index in range(len(first)))
        return type(first)(*joined) if hasattr(first, "_fields") else tuple(joined)
    return first


Progress = Callable[[int, int], None]
"""Called now and then with (samples read, samples in all)."""


@dataclass(frozen=True)
class BrokenSample:
    """A sample that could not be read: left out of its batch, and reported."""

    id: int
    path: str
    reason: str


@dataclass(frozen=True)
class Batch:
    """One micro-batch.

    Attributes:
        inputs: Tensors, N samples each, nested as the task likes. Of images uint8 [N, C, H, W] from a back-end, and
            normalised float after the prefetcher.
        targets: Likewise. Of images class indices, int64 [N]; of mixed samples probabilities, float [N, classes].
        ids: Ids of the samples in the batch, int64 [N]: the slice's without the broken ones.
        slice: The requested slice. broken: Samples of the slice that could not be read.
    """

    inputs: Nested
    targets: Nested
    ids: SampleIds
    slice: SampleSlice
    broken: tuple[BrokenSample, ...] = field(default=())

    @property
    def weight(self) -> int:
        """Weight of the batch's mean loss: its number of samples, or the sum of their weights."""
        if self.slice.phantom:
            return 0
        return len(self.ids) if self.slice.weight is None else self.slice.weight

    def pin_memory(self) -> Batch:
        """Move the tensors to page-locked memory (called by torch's DataLoader); those that cannot be are left."""
        inputs, targets = (mapped(_pinned, each) for each in (self.inputs, self.targets))
        return replace(self, inputs=inputs, targets=targets)


def _pinned(tensor: Tensor) -> Tensor:
    can_be = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return tensor.pin_memory() if can_be else tensor


class Backend(Protocol):
    """Turns slices into batches, one for each, in order. One object serves one split with its transform."""

    def batches(self, slices: Iterable[SampleSlice]) -> Iterator[Batch]:
        """Yield one uint8 batch per slice; consumes ``slices`` lazily."""
        ...

    def close(self) -> None:
        """Stop workers and release memory."""
        ...
