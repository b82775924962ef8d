"""Pictures with boxes, masks or label maps, as :mod:`paceline.data.inspect.check` looks at them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.boxes.dataset import BoxDataset, BoxSource, read_fitting
from paceline.data.image.datasets import ImageDataset
from paceline.data.image.source import Image
from paceline.data.masks.dataset import IMAGENET_MEAN, IMAGENET_STD, MaskDataset, MaskSource
from paceline.dataset_registry import named, open_dataset
from paceline.recipe.schema import Recipe

_KINDS: dict[str, type[MaskDataset | BoxDataset]] = {"masks": MaskDataset, "boxes": BoxDataset}


def is_annotated(name: str) -> bool:
    """Whether a data set reads such pictures from files."""
    return any(each.kind in _KINDS and each.uses("path") for each in named(name))


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


def open_annotated(recipe: Recipe) -> tuple[ImageDataset, tuple[str, ...]]:
    """Open the pictures of a recipe as images with any number of labels.

    Returns:
        The images, and a sentence for each kind of implausible annotation.

    Raises:
        DataError: If a run would refuse them.
    """
    data, implausible = recipe.data, tuple[str, ...]()
    image_size = 224 if data.image_size == "auto" else data.image_size
    needs_masks = data.detection.masks is True or "mask" in recipe.model.name or recipe.task == "segmentation"
    detection = replace(data.detection, masks=needs_masks and data.detection.masks is not False, keep_empty=True)
    opened = open_dataset(data.dataset, _KINDS, replace(data, detection=detection))
    left_out = opened.left_out
    if isinstance(opened, MaskDataset):
        train, validation = map(_of_masks, (opened.train, opened.validation))
    else:
        train, validation = (_of_boxes(each, len(opened.classes)) for each in (opened.train, opened.validation))
        implausible = opened.implausible
        left_out = tuple(each for each in left_out if each not in implausible)
        image_size = max(data.detection.short_sides or (224,)) if recipe.task == "detection" else image_size
    dataset = ImageDataset(
        name=data.dataset,
        train=train,
        validation=validation,
        classes=opened.classes,
        channels=3,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        left_out=left_out,
        image_size=image_size,
    )
    return dataset, implausible
