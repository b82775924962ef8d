"""Batches of pictures of varying sizes, with their objects.

A batch's inputs are a list of pictures, float [3, H, W] between 0 and 1, and its targets a list of dicts: ``boxes``
float [M, 4], ``labels`` int64 [M], ``crowd`` bool [M] and, if requested, ``masks`` uint8 [M, H, W].

Files are read and decoded in threads of this process, some micro-batches ahead, since decoding releases the GIL.
Pictures are flipped and resized on the device, so that reads and copies stay small. Each random draw is keyed by (seed,
epoch, sample id).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from paceline.data.batch import Batch, BrokenSample, Placement, to_device
from paceline.data.image.decode import BrokenImageError
from paceline.data.pipeline import SimplePipeline, prefetch_map
from paceline.data.random_draws import uniforms
from paceline.data.slices import SampleIds, SampleSlice
from paceline.recipe.data import Boxes
from paceline_vision.detection.dataset import BoxDataset, BoxSource, DetectedObjects, read_fitting

Target = dict[str, Tensor]

_BLANK = 64


def scaled_size(height: int, width: int, short_side: int, long_side: int) -> tuple[int, int]:
    """Return height and width with shorter side ``short_side``, reduced if the longer would exceed ``long_side``."""
    scale = min(short_side / min(height, width), long_side / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))


def scaled_sizes(sizes: NDArray[np.int64], boxes: Boxes, seed: int) -> NDArray[np.int64]:
    """Return each picture's height and width in the first epoch, [N, 2]; ``sizes`` are the stored ones."""
    if boxes.short_sides is None:
        return sizes
    draws = uniforms(seed, 0, np.arange(len(sizes)), 2)[:, 1]
    short_sides = np.array(boxes.short_sides)[(draws * len(boxes.short_sides)).astype(np.int64)]
    scales = np.minimum(short_sides / sizes.min(axis=1), boxes.long_side / sizes.max(axis=1))
    scaled: NDArray[np.int64] = np.maximum(1, np.rint(sizes * scales[:, None])).astype(np.int64)
    return scaled


def flipped(image: Tensor, target: Target) -> tuple[Tensor, Target]:
    """Mirror a picture [C, H, W] and its objects."""
    left, top, right, bottom = target["boxes"].unbind(1)
    width = image.shape[2]
    changed = {"boxes": torch.stack((width - right, top, width - left, bottom), dim=1)}
    if "masks" in target:
        changed["masks"] = target["masks"].flip(2)
    return image.flip(2), {**target, **changed}


def resized(image: Tensor, target: Target, size: tuple[int, int]) -> tuple[Tensor, Target]:
    """Resize a picture [C, H, W] and its objects bilinearly, as torchvision's detectors do."""
    rows, columns = size[0] / image.shape[1], size[1] / image.shape[2]
    factors = torch.tensor((columns, rows, columns, rows))
    if image.device.type == "cuda":  # from pageable memory, the copy would wait for the device
        factors = factors.pin_memory()
    changed: dict[str, Any] = {"boxes": target["boxes"] * factors.to(image.device, non_blocking=True)}
    if "masks" in target:
        masks = target["masks"][:, None].float()
        # torch refuses to resize an empty tensor.
        changed["masks"] = (
            functional.interpolate(masks, size)[:, 0].to(torch.uint8)
            if len(masks)
            else target["masks"].new_zeros((0, *size))
        )
    larger = functional.interpolate(image[None], size, mode="bilinear", align_corners=False)[0]
    return larger, {**target, **changed}


def with_blank(batch: Batch, device: torch.device) -> Batch:
    """Replace a batch whose samples are all broken by a picture without objects and with zero weight."""
    if len(batch.ids):
        return batch
    target = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}
    target |= {"crowd": torch.zeros(0, dtype=torch.bool), "masks": torch.zeros(0, _BLANK, _BLANK, dtype=torch.uint8)}
    image = torch.zeros(3, _BLANK, _BLANK, device=device)
    return replace(batch, inputs=[image], targets=[{name: each.to(device) for name, each in target.items()}])


class BoxPipeline(SimplePipeline):
    """Training and evaluation batches of pictures with boxes.

    Args:
        dataset: The pictures.
        boxes: Sizes and augmentation of pictures.
        masks: Whether to read masks.
        seed: Seed of each sample's random draws.
        placement: Target device and layout of batches.
        threads: Reading threads; 0 reads on request.
        prefetch: Micro-batches to read ahead per thread.
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
        self._boxes, self._seed = boxes, seed
        held_out = len(dataset.validation)
        super().__init__(
            self._pictures, evaluation_samples=held_out, placement=placement, threads=threads, prefetch=prefetch
        )

    def _batches(self, slices: Iterable[SampleSlice], *, training: bool) -> Iterator[Batch]:
        read = partial(self._batch, training=training)
        batches = prefetch_map(read, slices, threads=self._threads, prefetch=self._prefetch)

        def finish(batch: Batch) -> Batch:
            return with_blank(self._augmented(batch) if training else batch, self._placement.device)

        return to_device(batches, as_floats, self._placement, finish, self._moving if training else nullcontext)

    def _augmented(self, batch: Batch) -> Batch:
        """Flip and resize the pictures of a batch, with their boxes and masks, by their random draws."""
        sides, samples = self._boxes.short_sides, []
        draws = uniforms(self._seed, batch.slice.epoch, batch.ids, 2).tolist()
        for image, target, (flip, scale) in zip(batch.inputs, batch.targets, draws, strict=True):
            if flip < self._boxes.flip:
                image, target = flipped(image, target)  # noqa: PLW2901
            if sides is not None:
                height, width = image.shape[1:]
                size = scaled_size(height, width, sides[int(scale * len(sides))], self._boxes.long_side)
                if size != (height, width):
                    image, target = resized(image, target, size)  # noqa: PLW2901
            samples.append((image, target))
        return replace(batch, inputs=[image for image, _ in samples], targets=[target for _, target in samples])

    def _pictures(self, part: SampleSlice, training: bool) -> Batch:
        source = self._sources[training]

        def read(row: int) -> tuple[Tensor, Target]:
            sample = int(part.ids[row])
            pixels = read_fitting(source, sample)
            height, width = pixels.shape[:2]
            objects = source.objects(sample, masks=self._masks)
            return as_tensor(pixels), target_of(objects.trainable(height, width) if training else objects)

        samples, ids, broken = read_intact(part, read)
        return Batch([image for image, _ in samples], [target for _, target in samples], ids, part, broken)


def read_intact(
    part: SampleSlice, read: Callable[[int], tuple[Tensor, Any]]
) -> tuple[list[tuple[Tensor, Any]], SampleIds, tuple[BrokenSample, ...]]:
    """Read the samples of a slice; return the intact ones by position, their ids, and the broken ones.

    Args:
        part: The slice.
        read: Reads one sample; raises BrokenImageError.
    """
    intact, ids, broken = list[tuple[Tensor, Any]](), list[int](), list[BrokenSample]()
    for row, sample in enumerate(part.ids.tolist()):
        try:
            intact.append(read(row))
            ids.append(sample)
        except BrokenImageError as error:
            broken.append(BrokenSample(sample, error.path, error.reason))
    return intact, np.array(ids, dtype=np.int64), tuple(broken)


def as_tensor(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> Tensor:
    """Convert a decoded picture [H, W, 3] to a new tensor, uint8 [3, H, W]."""
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def target_of(objects: DetectedObjects) -> Target:
    """Return a picture's objects as tensors; classes start at 1, since 0 is the background."""
    target = {
        "boxes": torch.from_numpy(objects.boxes.astype(np.float32)),
        "labels": torch.from_numpy(objects.labels + 1),
        "crowd": torch.from_numpy(objects.crowd),
    }
    return target if objects.masks is None else {**target, "masks": torch.from_numpy(objects.masks)}


def as_floats(images: list[Tensor]) -> list[Tensor]:
    """Convert pixels to floats between 0 and 1."""
    return [image.to(torch.float32).div_(255) for image in images]
