"""How large is a picture shown, and which way round? On the device, so that what is read and copied stays small.

Each draw is keyed by (seed, epoch, sample id): no worker, rank or moment changes it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from paceline.data.batch import Batch
from paceline.data.random_draws import uniforms
from paceline.recipe.boxes import Boxes

Target = dict[str, Tensor]

_BLANK = 64


def shown_size(height: int, width: int, short_side: int, long_side: int) -> tuple[int, int]:
    """Height and width with a shorter side of ``short_side``; less where the longer one would exceed ``long_side``."""
    scale = min(short_side / min(height, width), long_side / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))


def shown_sizes(sizes: NDArray[np.int64], boxes: Boxes, seed: int) -> NDArray[np.int64]:
    """Height and width of each picture as the first epoch shows it, [N, 2]; ``sizes`` are as they are read."""
    if boxes.short_sides is None:
        return sizes
    draws = uniforms(seed, 0, np.arange(len(sizes)), 2)[:, 1]
    short_sides = np.array(boxes.short_sides)[(draws * len(boxes.short_sides)).astype(np.int64)]
    scales = np.minimum(short_sides / sizes.min(axis=1), boxes.long_side / sizes.max(axis=1))
    shown: NDArray[np.int64] = np.maximum(1, np.rint(sizes * scales[:, None])).astype(np.int64)
    return shown


class TrainingView:
    """Flips and resizes the pictures of a batch, with their boxes and masks, as drawn for each."""

    def __init__(self, boxes: Boxes, seed: int) -> None:
        self._boxes = boxes
        self._seed = seed

    def __call__(self, batch: Batch) -> Batch:
        """The batch as the network learns from it; floats stay on their scale."""
        draws = uniforms(self._seed, batch.slice.epoch, batch.ids, 2)
        shown = [
            self._shown(image, target, float(flip), float(scale))
            for image, target, (flip, scale) in zip(batch.inputs, batch.targets, draws, strict=True)
        ]
        return replace(batch, inputs=[image for image, _ in shown], targets=[target for _, target in shown])

    def _shown(self, image: Tensor, target: Target, flip: float, scale: float) -> tuple[Tensor, Target]:
        if flip < self._boxes.flip:
            image, target = flipped(image, target)
        sides = self._boxes.short_sides
        if sides is None:
            return image, target
        height, width = image.shape[1:]
        size = shown_size(height, width, sides[int(scale * len(sides))], self._boxes.long_side)
        return (image, target) if size == (height, width) else resized(image, target, size)


def flipped(image: Tensor, target: Target) -> tuple[Tensor, Target]:
    """A picture [C, H, W] and its objects, mirrored."""
    left, top, right, bottom = target["boxes"].unbind(1)
    width = image.shape[2]
    changed = {"boxes": torch.stack((width - right, top, width - left, bottom), dim=1)}
    if "masks" in target:
        changed["masks"] = target["masks"].flip(2)
    return image.flip(2), {**target, **changed}


def resized(image: Tensor, target: Target, size: tuple[int, int]) -> tuple[Tensor, Target]:
    """A picture [C, H, W] and its objects at another height and width: bilinear, as torchvision's detectors do it."""
    rows, columns = size[0] / image.shape[1], size[1] / image.shape[2]
    changed: dict[str, Any] = {"boxes": target["boxes"] * _factors((columns, rows, columns, rows), image.device)}
    if "masks" in target:
        masks = target["masks"][:, None].float()
        # Of no object there is nothing to resize, which torch refuses.
        changed["masks"] = (
            functional.interpolate(masks, size)[:, 0].to(torch.uint8)
            if len(masks)
            else target["masks"].new_zeros((0, *size))
        )
    larger = functional.interpolate(image[None], size, mode="bilinear", align_corners=False)[0]
    return larger, {**target, **changed}


def _factors(values: tuple[float, ...], device: torch.device) -> Tensor:
    factors = torch.tensor(values)
    # From page-locked memory, or the copy would wait for the device.
    return factors.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else factors.to(device)


def with_something(batch: Batch, device: torch.device) -> Batch:
    """In the place of samples that were all broken: a picture without objects, which weighs nothing."""
    if len(batch.ids):
        return batch
    target = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}
    target |= {"crowd": torch.zeros(0, dtype=torch.bool), "masks": torch.zeros(0, _BLANK, _BLANK, dtype=torch.uint8)}
    image = torch.zeros(3, _BLANK, _BLANK, device=device)
    return replace(batch, inputs=[image], targets=[{name: each.to(device) for name, each in target.items()}])
