"""Pictures with boxes, masks or label maps, as :mod:`paceline.data.inspect.check` looks at them."""

from __future__ import annotations

from collections.abc import Callable
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
class _Pictures:
    """The pictures of one split, read with their annotations, which must fit.

    Attributes:
        labels: Which classes a picture's objects have, 0 or 1 [N, classes]; [N, 0] with label maps.
        read: Returns a picture; raises BrokenImageError.
        path: Returns its path.
    """

    labels: NDArray[Any]
    read: Callable[[int], Image]
    path: Callable[[int], str]

    def __len__(self) -> int:
        return len(self.labels)


def _of_boxes(source: BoxSource, classes: int) -> _Pictures:
    labels = np.zeros((len(source), classes), dtype=np.float32)
    for sample in range(len(source)):
        labels[sample, source.objects(sample, masks=False).labels] = 1

    def read(sample: int) -> Image:
        image, (height, width) = source.image(sample), source.sizes[sample]
        if image.shape[:2] != (height, width):
            found = f"it has {image.shape[1]}x{image.shape[0]} pixels, its annotations say {width}x{height}"
            raise BrokenImageError(source.path(sample), found)
        return image

    return _Pictures(labels, read, source.path)


def _of_masks(source: MaskSource) -> _Pictures:
    return _Pictures(np.zeros((len(source), 0)), lambda sample: source.read(sample)[0], source.path)


def open_annotated(recipe: Recipe) -> tuple[ImageDataset, tuple[str, ...]]:
    """Open the pictures of a recipe as images with any number of labels.

    Returns:
        The images, and a sentence for each kind of implausible annotation.

    Raises:
        DataError: If a run would refuse them.
    """
    data, implausible = recipe.data, tuple[str, ...]()
    image_size = 224 if data.image_size == "auto" else data.image_size
    if data.dataset == "masks":
        masks = open_masks(data)
        train, validation = map(_of_masks, (masks.train, masks.validation))
        classes, left_out = masks.classes, masks.left_out
    else:
        needs_masks = data.detection.masks is True or "mask" in recipe.model.name or recipe.task == "segmentation"
        boxes = open_coco(data.path, masks=needs_masks and data.detection.masks is not False, keep_empty=True)
        train, validation = (_of_boxes(each, len(boxes.classes)) for each in (boxes.train, boxes.validation))
        classes, implausible = boxes.classes, boxes.implausible
        left_out = tuple(each for each in boxes.left_out if each not in implausible)
        image_size = max(data.detection.short_sides or (224,)) if recipe.task == "detection" else image_size
    dataset = ImageDataset(
        name=data.dataset,
        train=train,
        validation=validation,
        classes=classes,
        channels=3,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        left_out=left_out,
        image_size=image_size,
    )
    return dataset, implausible
