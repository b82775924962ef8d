"""How do pictures of many sizes become the stream of batches that a detector trains on?

A batch's inputs are a list of pictures, float [3, H, W] between 0 and 1, and its targets a list of dicts: ``boxes``
float [M, 4], ``labels`` int64 [M], ``crowd`` bool [M] and, where they are read, ``masks`` uint8 [M, H, W].

Files are read and decoded in threads of this process, some micro-batches ahead: decoding leaves the interpreter to
others. What is drawn for a sample happens on the device (`showing.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.data.ahead import begun_ahead
from paceline.data.batch import Batch, BrokenSample, Progress
from paceline.data.boxes.objects import BoxDataset, BoxSource, Objects
from paceline.data.boxes.showing import Target, TrainingView, with_something
from paceline.data.image.decode import BrokenImageError
from paceline.data.order import StepGeometry, evaluation_slices
from paceline.data.pipeline import Placement
from paceline.data.prefetch import pinned, to_device
from paceline.data.slices import SampleSlice
from paceline.recipe.boxes import Boxes
from paceline.world import World

Read = tuple[Tensor, Target] | BrokenSample


class BoxPipeline:
    """Training and evaluation batches of pictures with boxes.

    Args:
        dataset: The pictures.
        boxes: How they are shown.
        masks: Whether masks are read.
        seed: Keys what is drawn for each sample.
        placement: Where batches end up.
        threads: Threads that read; 0 reads when a batch is asked for.
        prefetch: Micro-batches that are read ahead for each thread.
    """

    def __init__(
        self,
        dataset: BoxDataset,
        boxes: Boxes,
        *,
        masks: bool,
        seed: int,
        placement: Placement,
        threads: int = 0,
        prefetch: int = 2,
    ) -> None:
        self._sources: dict[bool, BoxSource] = {True: dataset.train, False: dataset.validation}
        self._masks = masks
        self._placement = placement
        self._view = TrainingView(boxes, seed)
        self._ahead = threads * prefetch
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="reader") if threads else None
        self._moving: Callable[[], AbstractContextManager[Any]] = nullcontext

    def start(self, *, training: bool, evaluation: bool) -> None:
        """Threads begin with the first batch."""

    def load(self, report: Progress) -> None:
        """Nothing is held in memory."""

    def train_batches(self, geometry: StepGeometry, first: int, last: int, world: World) -> Iterator[Batch]:
        """This process's micro-batches of the steps ``first`` to ``last`` (excluded)."""
        batches = self._batches(geometry.stream(first, last, world), training=True)
        return to_device(batches, as_floats, self._placement, self._finish, self._moving)

    def timed_by(self, moving: Callable[[], AbstractContextManager[Any]]) -> None:
        """Enter what ``moving`` gives where a training step waits for a batch that is being brought to the device."""
        self._moving = moving

    def evaluation_batches(self, batch_size: int, world: World) -> Iterator[Batch]:
        """This process's part of the held-out pictures, as large as they are."""
        slices = evaluation_slices(len(self._sources[False]), batch_size, world)
        fill = partial(with_something, device=self._placement.device)
        return to_device(self._batches(slices, training=False), as_floats, self._placement, fill)

    def sample_name(self, sample_id: int, *, training: bool) -> str:
        """The sample's file, or its set and number."""
        return self._sources[training].path(sample_id)

    def close(self) -> None:
        """Stop the threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _finish(self, batch: Batch) -> Batch:
        return with_something(self._view(batch), self._placement.device)

    def _batches(self, slices: Iterable[SampleSlice], *, training: bool) -> Iterator[Batch]:
        read = partial(self._read, training=training)
        if self._pool is None:
            for piece in slices:
                yield self._batch(piece, map(read, piece.ids.tolist()))
            return
        pool = self._pool

        def begin(piece: SampleSlice) -> tuple[SampleSlice, list[Future[Read]]]:
            return piece, [pool.submit(read, sample) for sample in piece.ids.tolist()]

        for piece, samples in begun_ahead(begin, slices, ahead=self._ahead, give_up=_cancel):
            yield self._batch(piece, (each.result() for each in samples))

    def _batch(self, piece: SampleSlice, samples: Iterable[Read]) -> Batch:
        found = list(samples)
        whole = [each for each in found if not isinstance(each, BrokenSample)]
        batch = Batch(
            inputs=[image for image, _ in whole],
            targets=[target for _, target in whole],
            ids=piece.ids[np.array([not isinstance(each, BrokenSample) for each in found], dtype=bool)],
            slice=piece,
            broken=tuple(each for each in found if isinstance(each, BrokenSample)),
        )
        return pinned(batch, self._placement)

    def _read(self, sample: int, *, training: bool) -> Read:
        source = self._sources[training]
        try:
            pixels = source.image(sample)
            height, width = pixels.shape[:2]
            if (height, width) != tuple(source.sizes[sample]):
                said = "x".join(map(str, source.sizes[sample][::-1]))
                raise BrokenImageError(
                    source.path(sample), f"it has {width}x{height} pixels, its annotations say {said}"
                )
            objects = source.objects(sample, masks=self._masks)
        except BrokenImageError as error:
            return BrokenSample(sample, error.path, error.reason)
        return as_tensor(pixels), target_of(objects.learnable(height, width) if training else objects)


def _cancel(begun: tuple[SampleSlice, list[Future[Read]]]) -> None:
    for each in begun[1]:
        each.cancel()


def as_tensor(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> Tensor:
    """A decoded picture [H, W, 3] as a tensor of its own, uint8 [3, H, W]."""
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def target_of(objects: Objects) -> Target:
    """A picture's objects as tensors; classes are numbered from 1, since 0 is the background."""
    target = {
        "boxes": torch.from_numpy(objects.boxes.astype(np.float32)),
        "labels": torch.from_numpy(objects.labels + 1),
        "crowd": torch.from_numpy(objects.crowd),
    }
    return target if objects.masks is None else {**target, "masks": torch.from_numpy(objects.masks)}


def as_floats(images: list[Tensor]) -> list[Tensor]:
    """Pixels between 0 and 1."""
    return [image.to(torch.float32).div_(255) for image in images]
