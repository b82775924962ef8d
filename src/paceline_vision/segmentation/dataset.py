"""Data sets of images with a label map each, which gives the class of each pixel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.data.image.source import Image
from paceline.data.splits import Source
from paceline.errors import DataError
from paceline_vision.detection.dataset import BoxDataset, BoxSource, read_fitting

IGNORED = 255
"""Value of pixels that are ignored in training and evaluation."""


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


LabelMap = NDArray[np.uint8]
"""The class of each pixel, [H, W]."""


MaskSource = Source[tuple[Image, LabelMap]]
"""The images of one split, uint8 [H, W, C], with their label maps."""


@dataclass(frozen=True, kw_only=True)
class MaskDataset:
    """Two splits of images with label maps.

    Attributes:
        name: Name of the data set.
        train: Training images.
        validation: Held-out images.
        classes: Class names, by index.
        digest: Identifies the data.
        mean: Mean of each channel, in [0, 1]; its length is the number of channels. By default ImageNet's, which
            published backbones expect.
        std: Standard deviation of each channel.
        files: Paths of all files; empty for synthetic images.
        split: Origin of the held-out images, for people.
        is_split_off: Whether they were split off the training images.
        left_out: Unused data, one sentence per kind.
        implausible: A sentence for each kind of implausible mask.
    """

    name: str
    train: MaskSource
    validation: MaskSource
    classes: tuple[str, ...]
    digest: str
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    files: tuple[str, ...] = ()
    split: str = ""
    is_split_off: bool = False
    left_out: tuple[str, ...] = ()
    implausible: tuple[str, ...] = ()


@dataclass(frozen=True)
class _ObjectMasks:
    """Label maps from pictures with object masks: background is 0, overlaps of two classes are ``IGNORED``."""

    source: BoxSource

    def __len__(self) -> int:
        return len(self.source)

    def read(self, sample: int) -> tuple[Image, LabelMap]:
        image, objects = read_fitting(self.source, sample), self.source.objects(sample, masks=True)
        assert objects.masks is not None
        labels = np.zeros(image.shape[:2], dtype=np.uint8)
        for label, mask in zip(objects.labels, objects.masks != 0, strict=True):
            labels[mask] = np.where((labels[mask] == 0) | (labels[mask] == label + 1), label + 1, IGNORED)
        return image, labels

    def path(self, sample: int) -> str:
        return self.source.path(sample)


def from_objects(boxes: BoxDataset) -> MaskDataset:
    """Convert a detection data set to one of label maps; class 0 is the background.

    Raises:
        DataError: If it has more classes than a label map has values.
    """
    if len(boxes.classes) >= IGNORED:
        raise DataError(f"it has {len(boxes.classes)} classes, but task=segmentation learns {IGNORED - 1} at most.")
    return MaskDataset(
        name=boxes.name,
        train=_ObjectMasks(boxes.train),
        validation=_ObjectMasks(boxes.validation),
        classes=("background", *boxes.classes),
        digest=boxes.digest,
        files=boxes.files,
        split=boxes.split,
        is_split_off=boxes.is_split_off,
        left_out=boxes.left_out,
        implausible=boxes.implausible,
    )
