"""How do uint8 batches become normalised floats on the device without making the step wait?

On a GPU, batch *n + 1* is copied and normalised on a side stream while *n* is computed on. On the CPU the same
arithmetic runs in line, one batch at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from paceline.data.batch import Batch
from paceline.data.pipeline import Placement


class Normalize:
    """uint8 [N, C, H, W] to float32 ``(x / 255 - mean) / std``, as one multiplication and one addition."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...], placement: Placement) -> None:
        shape = (1, len(mean), 1, 1)
        deviation = torch.tensor(std, dtype=torch.float64)
        scale = 1 / (255 * deviation)
        shift = -torch.tensor(mean, dtype=torch.float64) / deviation
        self._scale = scale.float().view(shape).to(placement.device)
        self._shift = shift.float().view(shape).to(placement.device)
        self._format = torch.channels_last if placement.channels_last else torch.contiguous_format

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Normalise; the result has the placement's memory format."""
        pixels = images.to(torch.float32, memory_format=self._format)
        return pixels.mul_(self._scale).add_(self._shift)


def to_device(batches: Iterator[Batch], normalize: Normalize, placement: Placement) -> Iterator[Batch]:
    """Yield each batch on the device, normalised; one ahead where the device has streams."""
    if placement.device.type in ("cuda", "xpu"):
        return _one_ahead(batches, normalize, placement.device)
    return (_moved(batch, normalize, placement.device) for batch in batches)


def _moved(batch: Batch, normalize: Normalize, device: torch.device) -> Batch:
    inputs = batch.inputs.to(device, non_blocking=True)
    targets = batch.targets.to(device, non_blocking=True)
    if len(batch.ids) == 0:
        # Every sample of the micro-batch was broken: a blank one with weight zero keeps the collectives matched.
        inputs, targets = inputs.new_zeros((1, *inputs.shape[1:])), targets.new_zeros(1)
    return replace(batch, inputs=normalize(inputs), targets=targets)


def _one_ahead(batches: Iterator[Batch], normalize: Normalize, device: torch.device) -> Iterator[Batch]:
    backend: Any = torch.get_device_module(device)
    side = backend.Stream(device)

    def fetch() -> Batch | None:
        with backend.stream(side):
            batch = next(batches, None)
            return None if batch is None else _moved(batch, normalize, device)

    ready = fetch()
    while ready is not None:
        main = backend.current_stream(device)
        main.wait_stream(side)
        for tensor in (ready.inputs, ready.targets):
            # Allocated on the side stream, used on this one: the allocator must not reuse it too early.
            tensor.record_stream(main)
        current, ready = ready, fetch()
        yield current
