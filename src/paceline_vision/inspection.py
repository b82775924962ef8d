"""Pictures with boxes, masks or label maps, as `paceline check-data` looks at them: with any number of labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.image.dataset import ImageDataset
from paceline.data.image.source import Image
from paceline.plugins.dataset_registry import PictureHooks, open_registered
from paceline.recipe.data import Data
from paceline.recipe.schema import Recipe
from paceline_vision.detection.dataset import BoxDataset, BoxSource, read_fitting
from paceline_vision.segmentation.dataset import IMAGENET_MEAN, IMAGENET_STD, MaskDataset, MaskSource

_SIZE = 224


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

    return _Pictures(labels, partial(read_fitting, source), source.path)


def _of_masks(source: MaskSource) -> _Pictures:
    return _Pictures(np.zeros((len(source), 0)), lambda sample: source.read(sample)[0], source.path)


def pictures_with_boxes(recipe: Recipe) -> tuple[ImageDataset, tuple[str, ...]]:
    """Open the pictures of a detection data set, with a sentence for each kind of implausible annotation.

    Raises:
        DataError: If a run would refuse them.
    """
    data = recipe.data
    needs_masks = data.detection.masks is True or "mask" in recipe.model.name or recipe.task == "segmentation"
    detection = replace(data.detection, masks=needs_masks and data.detection.masks is not False, keep_empty=True)
    opened = open_registered(data.dataset, {"boxes": BoxDataset}, replace(data, detection=detection))
    train, validation = (_of_boxes(each, len(opened.classes)) for each in (opened.train, opened.validation))
    left_out = tuple(each for each in opened.left_out if each not in opened.implausible)
    images = _as_images(data, train, validation, opened.classes, left_out)
    if recipe.task == "detection":
        images = replace(images, image_size=max(data.detection.short_sides or (_SIZE,)))
    return images, opened.implausible


def pictures_with_label_maps(recipe: Recipe) -> tuple[ImageDataset, tuple[str, ...]]:
    """Open the pictures of a segmentation data set, with a sentence for each kind of implausible mask."""
    opened = open_registered(recipe.data.dataset, {"masks": MaskDataset}, recipe.data)
    train, validation = map(_of_masks, (opened.train, opened.validation))
    return _as_images(recipe.data, train, validation, opened.classes, opened.left_out), opened.implausible


def _as_images(
    data: Data, train: _Pictures, validation: _Pictures, classes: tuple[str, ...], left_out: tuple[str, ...]
) -> ImageDataset:
    return ImageDataset(
        name=data.dataset,
        train=train,
        validation=validation,
        classes=classes,
        channels=3,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        left_out=left_out,
        image_size=_SIZE if data.image_size == "auto" else data.image_size,
    )


# What chooses a recipe is named, since the data sets must not import torch.
WITH_BOXES = PictureHooks(pictures_with_boxes, "paceline_vision.first_recipe:choose_detector")
WITH_LABEL_MAPS = PictureHooks(pictures_with_label_maps, "paceline_vision.first_recipe:choose_segmenter")
