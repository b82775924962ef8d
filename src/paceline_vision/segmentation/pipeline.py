"""Batches of images with label maps, which give the class of each pixel.

A batch's inputs are float [N, C, S, S], normalised, and its targets uint8 [N, S, S]: class indices, ``IGNORED`` for
pixels without a target. Image and label map get the same crop, flip and size, keyed by (seed, epoch, sample id).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from paceline.data.batch import Batch
from paceline.data.image.source import Image
from paceline.data.image.transforms import Draws, draw, random_resized_box
from paceline.data.pipeline import Normalize, Placement, SimplePipeline
from paceline.data.slices import SampleSlice
from paceline.recipe.data import Augment
from paceline_vision.detection.pipeline import read_intact
from paceline_vision.segmentation.dataset import IGNORED, LabelMap, MaskDataset, MaskSource


def fitted(image: Tensor, size: int, fill: Sequence[int], interpolation: str) -> Tensor:
    """Resize until the longer side is ``size``, and pad at the right and bottom; [C, size, size].

    Args:
        image: uint8 [C, H, W].
        size: Height and width of the result.
        fill: Padding value of each channel.
        interpolation: ``bilinear`` or ``bicubic``; ``nearest-exact`` for label maps, whose values are categories.
    """
    height, width = fitted_size(image.shape[1], image.shape[2], size)
    padded = torch.tensor(fill, dtype=torch.uint8)[:, None, None].repeat(1, size, size)
    padded[:, :height, :width] = _resized(image, (height, width), interpolation)
    return padded


def _resized(image: Tensor, size: tuple[int, int], mode: str) -> Tensor:
    return interpolate(image[None], size, mode=mode, antialias=mode != "nearest-exact")[0]


def fitted_size(height: int, width: int, size: int) -> tuple[int, int]:
    """Return the height and width of an image whose longer side becomes ``size``."""
    longer = max(height, width)
    return max(1, round(height * size / longer)), max(1, round(width * size / longer))


def fill_of(mean: Sequence[float]) -> list[int]:
    """Return the padding values, which are almost zero after normalisation."""
    return [round(255 * each) for each in mean]


@dataclass(frozen=True, kw_only=True)
class MaskView:
    """Resizes an image and its label map: augmented in training, whole in evaluation.

    Attributes:
        size: Height and width of the network's input.
        augment: The recipe's section, for training; None for the whole image.
        seed: Keys the random draws.
        mean: Mean of each channel, in [0, 1], used as padding.
        interpolation: Resizing filter of images.
    """

    size: int
    augment: Augment | None
    seed: int
    mean: tuple[float, ...]
    interpolation: str

    def draws(self, part: SampleSlice) -> Draws | None:
        """Return the random draws for the samples of a slice."""
        return None if self.augment is None else draw(self.augment, self.seed, part.epoch, part.variation_keys)

    def __call__(self, image: Image, labels: LabelMap, draws: Draws | None) -> tuple[Tensor, Tensor]:
        """Return uint8 [C, S, S] and [S, S]; ``draws`` holds the sample's row."""
        pixels = torch.from_numpy(np.array(image.transpose(2, 0, 1), order="C"))
        classes = torch.from_numpy(np.array(labels))[None]
        both = ((pixels, fill_of(self.mean), self.interpolation), (classes, [IGNORED], "nearest-exact"))
        if draws is None or draws.attempts is None or self.augment is None:
            pixels, classes = (fitted(each, self.size, fill, mode) for each, fill, mode in both)
        else:
            box = random_resized_box(draws.attempts[0], labels.shape, self.augment.scale, self.augment.ratio)
            rows, columns = slice(box.top, box.top + box.height), slice(box.left, box.left + box.width)
            pixels, classes = (_resized(each[:, rows, columns], (self.size,) * 2, mode) for each, _, mode in both)
        if draws is not None and draws.flip[0]:
            pixels, classes = pixels.flip(2), classes.flip(2)
        return pixels, classes[0]


class MaskPipeline(SimplePipeline):
    """Training and evaluation batches of images with label maps.

    Args:
        dataset: The images.
        views: Preprocessing in training (True) and in evaluation (False).
        normalize: Converts uint8 images to the network's input.
        placement: Target device and layout of batches.
        threads: Reading threads; 0 reads on request.
        prefetch: Micro-batches to read ahead per thread.
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
            self._prepare,
            evaluation_samples=len(dataset.validation),
            placement=placement,
            threads=threads,
            prefetch=prefetch,
            normalize=normalize,
        )

    def _prepare(self, part: SampleSlice, training: bool) -> Batch:
        view, source = self._views[training], self._sources[training]
        draws, size = view.draws(part), view.size

        def read(row: int) -> tuple[Tensor, Tensor]:
            image, labels = source.read(int(part.ids[row]))
            return view(image, labels, None if draws is None else draws.select(slice(row, row + 1)))

        samples, ids, broken = read_intact(part, read)
        if not samples:
            nothing = torch.empty((0, len(view.mean) + 1, size, size), dtype=torch.uint8)
            return Batch(nothing[:, :-1], nothing[:, -1], ids, part, broken)
        inputs, targets = (torch.stack(each) for each in zip(*samples, strict=True))
        return Batch(inputs, targets, ids, part, broken)
