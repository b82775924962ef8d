"""Batches of pictures of many sizes, with their objects.

A batch's inputs are a list of pictures, float [3, H, W] between 0 and 1, and its targets a list of dicts: ``boxes``
float [M, 4], ``labels`` int64 [M], ``crowd`` bool [M] and, where they are read, ``masks`` uint8 [M, H, W].

Files are read and decoded in threads of this process, some micro-batches ahead: decoding leaves the interpreter to
others. What is drawn for a sample happens on the device (`showing.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.data.ahead import made_ahead
from paceline.data.batch import Batch, BrokenSample
from paceline.data.boxes.objects import BoxDataset, BoxSource, Objects
from paceline.data.boxes.showing import Target, TrainingView, with_something
from paceline.data.image.decode import BrokenImageError
from paceline.data.pipeline import Placement
from paceline.data.prefetch import to_device
from paceline.data.simple import SimplePipeline
from paceline.data.slices import SampleSlice
from paceline.recipe.boxes import Boxes

Read = tuple[Tensor, Target] | BrokenSample


class BoxPipeline(SimplePipeline):
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
        self._view = TrainingView(boxes, seed)
        held_out = len(dataset.validation)
        super().__init__(
            self._pictures, evaluation_samples=held_out, placement=placement, threads=threads, prefetch=prefetch
        )

    def sample_name(self, sample_id: int, *, training: bool) -> str:
        """The sample's file, or its set and number."""
        return self._sources[training].path(sample_id)

    def _batches(self, slices: Iterable[SampleSlice], *, training: bool) -> Iterator[Batch]:
        read = partial(self._batch, training=training)
        batches = made_ahead(read, slices, threads=self._threads, prefetch=self._prefetch)

        def finish(batch: Batch) -> Batch:
            return with_something(self._view(batch) if training else batch, self._placement.device)

        return to_device(batches, as_floats, self._placement, finish, self._moving if training else nullcontext)

    def _pictures(self, part: SampleSlice, training: bool) -> Batch:
        found = [self._picture(sample, training=training) for sample in part.ids.tolist()]
        whole = [each for each in found if not isinstance(each, BrokenSample)]
        return Batch(
            inputs=[image for image, _ in whole],
            targets=[target for _, target in whole],
            ids=part.ids[np.array([not isinstance(each, BrokenSample) for each in found], dtype=bool)],
            slice=part,
            broken=tuple(each for each in found if isinstance(each, BrokenSample)),
        )

    def _picture(self, sample: int, *, training: bool) -> Read:
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
