"""How do uint8 batches become normalised floats on the device without making the step wait?

On a GPU, batch *n + 1* is copied or gathered, normalised and mixed on a side stream while *n* is computed on. On the
CPU the same arithmetic runs in line, one batch at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from paceline.data.batch import Batch
from paceline.data.nested import Nested, mapped, tensors_in
from paceline.data.pipeline import Placement


class Normalize:
    """uint8 [N, C, H, W] to float32 ``(x / 255 - mean) / std``, as one multiplication and one addition."""

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
            self._factors[size] = (self._whole(self._scale, size), self._whole(self._shift, size))
        scale, shift = self._factors[size]
        return images.to(torch.float32, memory_format=self._format).mul_(scale).add_(shift)

    def _whole(self, factor: torch.Tensor, size: torch.Size) -> torch.Tensor:
        # As large as an image: three factors broadcast along the fastest axis (channels last) would not be vectorised.
        return factor.expand(1, *size).contiguous(memory_format=self._format).to(self._device)


def as_they_are(inputs: Nested) -> Nested:
    """For :func:`to_device`: inputs that the network takes as they come."""
    return inputs


def pinned(batch: Batch, placement: Placement) -> Batch:
    """Where batches go to a GPU, the same in page-locked memory: from other memory, a copy makes the host wait."""
    return batch.pin_memory() if placement.device.type == "cuda" else batch


def to_device(
    batches: Iterator[Batch],
    normalize: Callable[[Nested], Nested],
    placement: Placement,
    finish: Callable[[Batch], Batch] | None = None,
    moving: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[Batch]:
    """Yield each batch on the device, normalised; one ahead where the device has streams.

    Args:
        batches: From a back-end.
        normalize: Makes of their inputs what the network takes: floats of images.
        placement: Where they are to be.
        finish: What is done to them there.
        moving: Entered where the step waits for that. Beside the step it costs nothing.
    """

    def move(batch: Batch) -> Batch:
        moved = _moved(batch, normalize, placement.device)
        return moved if finish is None else finish(moved)

    def move_here(batch: Batch) -> Batch:
        with moving():
            return move(batch)

    if placement.device.type in ("cuda", "xpu"):
        return _one_ahead(batches, move, placement.device, moving)
    return map(move_here, batches)


def _moved(batch: Batch, normalize: Callable[[Nested], Nested], device: torch.device) -> Batch:
    both = (batch.inputs, batch.targets)
    inputs, targets = (mapped(lambda each: each.to(device, non_blocking=True), nested) for nested in both)
    if len(batch.ids) == 0:
        # Every sample of the micro-batch was broken: a blank one with weight zero keeps the collectives matched.
        blank = (mapped(lambda each: each.new_zeros((1, *each.shape[1:])), nested) for nested in (inputs, targets))
        inputs, targets = blank
    return Batch(normalize(inputs), targets, batch.ids, batch.slice, batch.broken)


def _one_ahead(
    batches: Iterator[Batch],
    move: Callable[[Batch], Batch],
    device: torch.device,
    moving: Callable[[], AbstractContextManager[Any]],
) -> Iterator[Batch]:
    backend: Any = torch.get_device_module(device)
    side = backend.Stream(device)
    # What batches are made of may lie on the device already, and have been brought there on this stream.
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
