"""Pictures with boxes, masks or label maps, as :mod:`paceline.data.inspect.check` looks at them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.boxes.coco import open_coco
from paceline.data.boxes.pipeline import BoxSource
from paceline.data.image.datasets import ImageDataset
from paceline.data.image.decode import BrokenImageError
from paceline.data.image.source import Image
from paceline.data.masks.folder import open_masks
from paceline.data.masks.pipeline import IMAGENET_MEAN, IMAGENET_STD, MaskSource
from paceline.recipe.schema import Recipe

ANNOTATED = ("coco", "masks")
"""Data sets of such pictures."""


@dataclass(frozen=True)
class _Boxes:
    """Pictures with boxes; the labels are the classes of their objects, 0 or 1 [N, classes]."""

    source: BoxSource
    labels: NDArray[Any]

    def __len__(self) -> int:
        return len(self.source)

    def read(self, sample: int) -> Image:
        image, (height, width) = self.source.image(sample), self.source.sizes[sample]
        if image.shape[:2] != (height, width):
            found = f"it has {image.shape[1]}x{image.shape[0]} pixels, its annotations say {width}x{height}"
            raise BrokenImageError(self.path(sample), found)
        return image

    def path(self, sample: int) -> str:
        return self.source.path(sample)


@dataclass(frozen=True)
class _Masks:
    """Images with label maps, which must fit; they have no labels, [N, 0]."""

    source: MaskSource
    labels: NDArray[Any]

    def __len__(self) -> int:
        return len(self.source)

    def read(self, sample: int) -> Image:
        return self.source.read(sample)[0]

    def path(self, sample: int) -> str:
        return self.source.path(sample)


def open_annotated(recipe: Recipe) -> tuple[ImageDataset, tuple[str, ...]]:
    """Open the pictures of a recipe as images with any number of labels.

    Returns:
        The images, and a sentence for each kind of implausible annotation.

    Raises:
        DataError: If a run would refuse them.
    """
    data, implausible = recipe.data, tuple[str, ...]()
    sizes = {"image_size": 224 if data.image_size == "auto" else data.image_size}
    if data.dataset == "masks":
        masks = open_masks(data)
        splits: list[Any] = [_Masks(each, np.zeros((len(each), 0))) for each in (masks.train, masks.validation)]
        classes, left_out = masks.classes, masks.left_out
    else:
        needs_masks = data.detection.masks is True or "mask" in recipe.model.name or recipe.task == "segmentation"
        boxes = open_coco(data.path, masks=needs_masks and data.detection.masks is not False, keep_empty=True)
        splits = [_Boxes(each, _classes(each, len(boxes.classes))) for each in (boxes.train, boxes.validation)]
        classes, implausible = boxes.classes, boxes.implausible
        left_out = tuple(each for each in boxes.left_out if each not in implausible)
        sizes = {"image_size": max(data.detection.short_sides or (224,))} if recipe.task == "detection" else sizes
    train, validation = splits
    dataset = ImageDataset(
        name=data.dataset,
        train=train,
        validation=validation,
        classes=classes,
        channels=3,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        left_out=left_out,
        **sizes,
    )
    return dataset, implausible


def _classes(source: BoxSource, classes: int) -> NDArray[np.float32]:
    """Return which classes each picture has, 0 or 1 [N, classes]."""
    labels = np.zeros((len(source), classes), dtype=np.float32)
    for sample in range(len(source)):
        labels[sample, source.objects(sample, masks=False).labels] = 1
    return labels
