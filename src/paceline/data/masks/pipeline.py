"""Batches of images with a label map each: which class each pixel shows.

A batch's inputs are float [N, 3, S, S], normalised, and its targets uint8 [N, S, S]: class indices, ``IGNORED`` where
there is nothing to learn. Image and label map get the same crop, flip and size, keyed by (seed, epoch, sample id).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from paceline.data.batch import Batch
from paceline.data.boxes.coco import files_of_pictures
from paceline.data.boxes.pipeline import BoxDataset, BoxSource, read_whole
from paceline.data.image.augmentation import Draws, draw, random_resized_box
from paceline.data.image.decode import BrokenImageError
from paceline.data.image.source import Image
from paceline.data.pipeline import Normalize, Placement, SimplePipeline
from paceline.data.slices import SampleSlice
from paceline.errors import DataError
from paceline.recipe.data import Augment

IGNORED = 255
"""The value of pixels that are neither learned nor scored."""

LabelMap = NDArray[np.uint8]
"""The class of each pixel, [H, W]."""


class MaskSource(Protocol):
    """The images of one split with their label maps; ids are 0 … len - 1."""

    def __len__(self) -> int: ...

    def read(self, sample: int) -> tuple[Image, LabelMap]:
        """The image, uint8 [H, W, 3], and its label map.

        Raises:
            BrokenImageError: If one of them cannot be read, or they differ in size.
        """
        ...

    def path(self, sample: int) -> str:
        """The name under which the sample is reported to the user."""
        ...


@dataclass(frozen=True, kw_only=True)
class MaskDataset:
    """Two splits of images with label maps.

    Attributes:
        name: The data set's.
        train: Training images.
        validation: Held-out images.
        classes: The classes' names, by index.
        digest: Identifies the data. files: Paths of all files; empty if the images are drawn.
        split: Where the held-out images come from, for people.
        is_split_off: Whether they were split off the training images.
        left_out: Data that is not used, one sentence per kind.
    """

    name: str
    train: MaskSource
    validation: MaskSource
    classes: tuple[str, ...]
    digest: str
    files: tuple[str, ...] = ()
    split: str = ""
    is_split_off: bool = False
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class _FromObjects:
    """Pictures whose objects have masks, as label maps: background 0; where two classes overlap, ``IGNORED``."""

    source: BoxSource

    def __len__(self) -> int:
        return len(self.source)

    def read(self, sample: int) -> tuple[Image, LabelMap]:
        image, found = self.source.image(sample), self.source.objects(sample, masks=True)
        assert found.masks is not None
        if image.shape[:2] != tuple(self.source.sizes[sample]):
            raise BrokenImageError(self.path(sample), "its annotations are of another size")
        labels = np.zeros(image.shape[:2], dtype=np.uint8)
        for label, mask in zip(found.labels, found.masks != 0, strict=True):
            labels[mask] = np.where((labels[mask] == 0) | (labels[mask] == label + 1), label + 1, IGNORED)
        return image, labels

    def path(self, sample: int) -> str:
        return self.source.path(sample)


def from_objects(boxes: BoxDataset) -> MaskDataset:
    """Return a detection data set as one of label maps; class 0 is the background.

    Raises:
        DataError: If it has more classes than a label map has values.
    """
    if len(boxes.classes) >= IGNORED:
        raise DataError(f"it has {len(boxes.classes)} classes, but task=segmentation learns {IGNORED - 1} at most.")
    return MaskDataset(
        name=boxes.name,
        train=_FromObjects(boxes.train),
        validation=_FromObjects(boxes.validation),
        classes=("background", *boxes.classes),
        digest=boxes.digest,
        files=files_of_pictures(boxes),
        left_out=boxes.left_out,
    )


def fitted(image: Tensor, size: int, fill: Sequence[int], interpolation: str) -> Tensor:
    """Resize until the longer side is ``size`` and pad at the right and below; [C, size, size].

    Args:
        image: uint8 [C, H, W].
        size: Height and width of the result.
        fill: What each channel is padded with.
        interpolation: ``bilinear`` or ``bicubic``; ``nearest-exact`` for label maps, whose values are no amounts.
    """
    height, width = fitted_size(image.shape[1], image.shape[2], size)
    padded = torch.tensor(fill, dtype=torch.uint8)[:, None, None].repeat(1, size, size)
    padded[:, :height, :width] = _resized(image, (height, width), interpolation)
    return padded


def _resized(image: Tensor, size: tuple[int, int], mode: str) -> Tensor:
    return interpolate(image[None], size, mode=mode, antialias=mode != "nearest-exact")[0]


def fitted_size(height: int, width: int, size: int) -> tuple[int, int]:
    """Height and width of an image whose longer side becomes ``size``."""
    longer = max(height, width)
    return max(1, round(height * size / longer)), max(1, round(width * size / longer))


def fill_of(mean: Sequence[float]) -> list[int]:
    """What images are padded with, which the network sees as almost zero."""
    return [round(255 * each) for each in mean]


@dataclass(frozen=True, kw_only=True)
class MaskView:
    """Shows an image and its label map at one size: in training as drawn, in evaluation whole.

    Attributes:
        size: Height and width that the network sees.
        augment: The recipe's section, for training; None shows the whole image.
        seed: Keys the draws.
        mean: Of each channel, in [0, 1]: what images are padded with.
        interpolation: How images are resized.
    """

    size: int
    augment: Augment | None
    seed: int
    mean: tuple[float, ...]
    interpolation: str

    def draws(self, part: SampleSlice) -> Draws | None:
        """What is drawn for the samples of a slice."""
        return None if self.augment is None else draw(self.augment, self.seed, part.epoch, part.variation_keys)

    def __call__(self, image: Image, labels: LabelMap, drawn: Draws | None) -> tuple[Tensor, Tensor]:
        """Return uint8 [3, S, S] and [S, S]; ``drawn`` holds the sample's row."""
        pixels = torch.from_numpy(np.array(image.transpose(2, 0, 1), order="C"))
        classes = torch.from_numpy(np.array(labels))[None]
        both = ((pixels, fill_of(self.mean), self.interpolation), (classes, [IGNORED], "nearest-exact"))
        if drawn is None or drawn.attempts is None or self.augment is None:
            pixels, classes = (fitted(each, self.size, fill, mode) for each, fill, mode in both)
        else:
            box = random_resized_box(drawn.attempts[0], labels.shape, self.augment.scale, self.augment.ratio)
            rows, columns = slice(box.top, box.top + box.height), slice(box.left, box.left + box.width)
            pixels, classes = (_resized(each[:, rows, columns], (self.size,) * 2, mode) for each, _, mode in both)
        if drawn is not None and drawn.flip[0]:
            pixels, classes = pixels.flip(2), classes.flip(2)
        return pixels, classes[0]


class MaskPipeline(SimplePipeline):
    """Training and evaluation batches of images with label maps.

    Args:
        dataset: The images.
        views: How they are shown in training (True) and in evaluation (False).
        normalize: Makes of uint8 images what the network sees.
        placement: Where batches end up.
        threads: Threads that read; 0 reads on request.
        prefetch: Micro-batches that are read ahead for each thread.
    """

    def __init__(
        self,
        dataset: MaskDataset,
        views: dict[bool, MaskView],
        normalize: Normalize,
        *,
        placement: Placement,
        threads: int = 0,
        prefetch: int = 2,
    ) -> None:
        self._sources: dict[bool, MaskSource] = {True: dataset.train, False: dataset.validation}
        self._views = views
        super().__init__(
            self._shown,
            evaluation_samples=len(dataset.validation),
            placement=placement,
            threads=threads,
            prefetch=prefetch,
            normalize=normalize,
        )

    def sample_name(self, sample_id: int, *, training: bool) -> str:
        """The sample's file, or its set and number."""
        return self._sources[training].path(sample_id)

    def _shown(self, part: SampleSlice, training: bool) -> Batch:
        view, source = self._views[training], self._sources[training]
        drawn, size = view.draws(part), view.size

        def read(row: int) -> tuple[Tensor, Tensor]:
            image, labels = source.read(int(part.ids[row]))
            return view(image, labels, None if drawn is None else drawn.where(slice(row, row + 1)))

        found, ids, broken = read_whole(part, read)
        if not found:
            nothing = torch.empty((0, 4, size, size), dtype=torch.uint8)
            return Batch(nothing[:, :3], nothing[:, 3], ids, part, broken)
        inputs, targets = (torch.stack(each) for each in zip(*found, strict=True))
        return Batch(inputs, targets, ids, part, broken)
