"""One micro-batch: nested tensors, their slice of samples, and the back-end interface.

A batch's tensors have samples along their first axis; its lists have one entry per sample (for example, pictures of
different shapes). Tuples and dicts nest such tensors or lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.data.slices import SampleIds, SampleSlice

Nested = Any
"""A tensor, or a tuple, list or dict (by name) of nested ones; other values stay unchanged."""


def mapped(function: Callable[[Tensor], Any], value: Nested) -> Nested:
    """Apply ``function`` to each tensor and keep the structure."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: mapped(function, each) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple takes its fields as separate arguments
        return type(value)(*(mapped(function, each) for each in value))
    if isinstance(value, list | tuple):
        return type(value)(mapped(function, each) for each in value)
    return value


def tensors_in(*values: Nested) -> Iterator[Tensor]:
    """Return every tensor, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from tensors_in(*value.values())
        elif isinstance(value, list | tuple):
            yield from tensors_in(*value)


def rows_of(value: Nested) -> int | None:
    """Return the number of samples in a batch's inputs: the length of the first tensor or list; None without one."""
    if isinstance(value, Tensor):
        return len(value) if value.ndim else None
    if isinstance(value, list):
        return len(value)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
    return next((rows for rows in map(rows_of, parts) if rows is not None), None)


def copied(value: Nested) -> Nested:
    """Return the same structure with copies of its tensors."""
    return mapped(lambda tensor: tensor.clone(), value)


def select_rows(value: Nested, rows: Sequence[int], *, size: int) -> Nested:
    """Select some samples of a batch's inputs or targets, in the given order.

    Args:
        value: A value for the whole batch.
        rows: Indices of samples; repeats are allowed.
        size: Number of samples in the batch. Values with another length are not per-sample and stay unchanged.
    """
    if isinstance(value, Tensor):
        if not value.ndim or len(value) != size:
            return value
        selected = value.index_select(0, torch.as_tensor(rows, dtype=torch.int64, device=value.device))
        is_last = value.ndim == 4 and value.is_contiguous(memory_format=torch.channels_last)
        return selected.contiguous(memory_format=torch.channels_last) if is_last else selected
    if isinstance(value, dict):
        return {key: select_rows(each, rows, size=size) for key, each in value.items()}
    if isinstance(value, list):
        is_of_samples = len(value) == size  # otherwise of columns, as torch's collate function makes it
        return [value[row] for row in rows] if is_of_samples else [select_rows(each, rows, size=size) for each in value]
    if isinstance(value, tuple):
        parts = (select_rows(each, rows, size=size) for each in value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def joined_along_samples(parts: list[Nested]) -> Nested:
    """Concatenate parts of a batch: tensors along their first axis, lists end to end.

    Args:
        parts: Parts of the same structure, at least one.

    Raises:
        RuntimeError: If tensors differ along other axes, for example in padded length.
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
"""Called periodically with (samples read, total samples)."""


@dataclass(frozen=True)
class BrokenSample:
    """A sample that could not be read: dropped from its batch and reported."""

    id: int
    path: str
    reason: str


@dataclass(frozen=True)
class Batch:
    """One micro-batch.

    Attributes:
        inputs: Tensors of N samples each, nested as the task defines. For images uint8 [N, C, H, W] from a back-end,
            and normalised floats after the prefetcher.
        targets: Likewise. For images class indices, int64 [N]; for mixed samples probabilities, float [N, classes].
        ids: Ids of the samples in the batch, int64 [N]: the slice's ids without broken samples.
        slice: The requested slice.
        broken: Samples of the slice that could not be read.
    """

    inputs: Nested
    targets: Nested
    ids: SampleIds
    slice: SampleSlice
    broken: tuple[BrokenSample, ...] = field(default=())

    @property
    def weight(self) -> int:
        """Weight of the batch's mean loss: its number of samples or the sum of their weights."""
        if self.slice.phantom:
            return 0
        return len(self.ids) if self.slice.weight is None else self.slice.weight

    def pin_memory(self) -> Batch:
        """Move the tensors to pinned memory if possible (called by torch's DataLoader)."""
        inputs, targets = (mapped(_pinned, each) for each in (self.inputs, self.targets))
        return replace(self, inputs=inputs, targets=targets)


def _pinned(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_pinned():
        return tensor
    # Unlike Tensor.pin_memory, without gaps between rows, since copying those to a GPU would block.
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor)


class Backend(Protocol):
    """Turns slices into batches, one per slice, in order. One object serves one split with its transform."""

    def batches(self, slices: Iterable[SampleSlice]) -> Iterator[Batch]:
        """Yield one uint8 batch per slice; consumes ``slices`` lazily."""
        ...

    def reading(self) -> str:
        """Describe which sample is being read, or was read last; empty if that is unknown."""
        ...

    def close(self) -> None:
        """Stop workers and release memory."""
        ...


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Device and layout of batches.

    Attributes:
        device: The model's device.
        channels_last: Whether images use the channels-last memory format.
    """

    device: torch.device
    channels_last: bool = False


class Normalize:
    """Normalise uint8 [N, C, H, W] to float32 ``(x / 255 - mean) / std``, as one multiplication and one addition."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...], placement: Placement) -> None:
        deviation = torch.tensor(std, dtype=torch.float64)
        self._scale = (1 / (255 * deviation)).float().view(1, -1, 1, 1)
        self._shift = (-torch.tensor(mean, dtype=torch.float64) / deviation).float().view(1, -1, 1, 1)
        self._device = placement.device
        self._format = torch.channels_last if placement.channels_last else torch.contiguous_format
        self._factors: dict[torch.Size, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Normalise; the result has the placement's memory format."""
        size = images.shape[1:]
        if size not in self._factors:
            self._factors[size] = (self._expand(self._scale, size), self._expand(self._shift, size))
        scale, shift = self._factors[size]
        return images.to(torch.float32, memory_format=self._format).mul_(scale).add_(shift)

    def _expand(self, factor: torch.Tensor, size: torch.Size) -> torch.Tensor:
        # As large as an image: broadcasting three factors along the fastest axis (channels last) would not be
        # vectorised.
        return factor.expand(1, *size).contiguous(memory_format=self._format).to(self._device)


def identity(inputs: Nested) -> Nested:
    """For :func:`to_device`: return inputs unchanged."""
    return inputs


def pinned(batch: Batch, device: torch.device) -> Batch:
    """Return a batch in pinned memory if it goes to a GPU: from pageable memory, the copy would block the host."""
    return batch.pin_memory() if device.type == "cuda" else batch


def to_device(
    batches: Iterator[Batch],
    normalize: Callable[[Nested], Nested],
    placement: Placement,
    finish: Callable[[Batch], Batch] | None = None,
    moving: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[Batch]:
    """Yield each batch on the device, normalised; one batch ahead if the device has streams.

    Args:
        batches: From a back-end.
        normalize: Converts their inputs to the network's, such as images to floats.
        placement: Target device and layout.
        finish: Further processing on the device.
        moving: Context entered while the step waits for the transfer; overlapped transfers are not included.
    """

    def move(batch: Batch) -> Batch:
        moved = _moved(batch, normalize, placement.device)
        return moved if finish is None else finish(moved)

    def move_on_stream(batch: Batch) -> Batch:
        with moving():
            return move(batch)

    if placement.device.type in ("cuda", "xpu"):
        return _prefetch_one(batches, move, placement.device, moving)
    return map(move_on_stream, batches)


def _moved(batch: Batch, normalize: Callable[[Nested], Nested], device: torch.device) -> Batch:
    inputs, targets = batch.inputs, batch.targets
    if device.type != "cpu":
        batch = pinned(batch, device)
        both = (batch.inputs, batch.targets)
        inputs, targets = (mapped(lambda each: each.to(device, non_blocking=True), nested) for nested in both)
    if len(batch.ids) == 0:
        # All samples of the micro-batch are broken: a blank one with weight zero keeps the collectives matched.
        blank = (mapped(lambda each: each.new_zeros((1, *each.shape[1:])), nested) for nested in (inputs, targets))
        inputs, targets = blank
    return Batch(normalize(inputs), targets, batch.ids, batch.slice, batch.broken)


def _prefetch_one(
    batches: Iterator[Batch],
    move: Callable[[Batch], Batch],
    device: torch.device,
    moving: Callable[[], AbstractContextManager[Any]],
) -> Iterator[Batch]:
    backend: Any = torch.get_device_module(device)
    side = backend.Stream(device)
    # The batch's source data may already be on the device, copied there on this stream.
    side.wait_stream(backend.current_stream(device))

    def fetch() -> Batch | None:
        with backend.stream(side):
            batch = next(batches, None)
            return None if batch is None else move(batch)

    ready = fetch()
    while ready is not None:
        main = backend.current_stream(device)
        with moving():
            main.wait_stream(side)
        for tensor in tensors_in(ready.inputs, ready.targets):
            # Allocated on the side stream, used on this one: the allocator must not reuse it too early.
            tensor.record_stream(main)
        current, ready = ready, fetch()
        yield current


# Batches read ahead are kept until their steps up to this size.
_MAX_HELD_BYTES = 256 * 2**20


class ReadAhead:
    """Batches that are read before their step, and the error that stopped reading, which is raised at its step."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self._taken: list[Batch] = []
        self._bytes = 0
        self.max_bytes = float(_MAX_HELD_BYTES)
        self._error: Exception | None = None

    def read(self) -> Batch | None:
        """Return the next batch; None at the end, after an error, or if more batches would take too much memory."""
        if self._error is not None or (self._taken and self._bytes * (1 + 1 / len(self._taken)) > self.max_bytes):
            return None
        try:
            batch = next(self._batches, None)
        except Exception as error:  # noqa: BLE001  # raised where its batch would have been
            self._error = error
            return None
        if batch is not None:
            self._taken.append(batch)
            self._bytes += sum(each.nbytes for each in tensors_in(batch.inputs, batch.targets))
        return batch

    def replay(self) -> Iterator[Batch]:
        """Yield all batches, starting with the first one read ahead."""
        while self._taken:
            yield self._taken.pop(0)
        if self._error is not None:
            raise self._error
        yield from self._batches
