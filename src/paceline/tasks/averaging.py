"""What does a network answer about several views of each image? Test-time augmentation.

The answer is the mean of the views' probabilities, as Krizhevsky et al. (2012) average ten crops and Simonyan and
Zisserman (2014) an image and its mirror; Jordan (arXiv:2404.00498, 2024) adds both moved by a pixel either way. It is
given as its logarithm: to whoever scores it, it is like any logits, and its cross-entropy is that of the mean.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.errors import RecipeError
from paceline.recipe.data import Data
from paceline.tasks.task import Model

CROPS = ("five_crop", "ten_crop")


class AveragedViews:
    """A network in whose place it is asked about several views of each image, one after the other.

    Args:
        model: The network: images [N, C, H, W] to logits [N, classes].
        kind: ``flip``, ``flip_shift``, ``five_crop`` or ``ten_crop``.
        side: Height and width of a crop in pixels.
    """

    def __init__(self, model: Model, kind: str, side: int) -> None:
        self._model = model
        self._kind = kind
        self._side = side

    def __call__(self, images: Tensor) -> Tensor:
        """The logarithm of the mean probabilities, float32 [N, classes]."""
        # In the same memory format: a compiled network is not compiled again for another.
        is_last = images.is_contiguous(memory_format=torch.channels_last)
        memory_format = torch.channels_last if is_last else torch.contiguous_format
        views = (view.contiguous(memory_format=memory_format) for view in self._views(images))
        logs = [self._model(view).float().log_softmax(dim=1) for view in views]
        if self._kind == "flip_shift":
            # The image and its mirror count as much as the four shifted views together.
            logs[:2] = [each + math.log(2) for each in logs[:2]]
        return torch.stack(logs).logsumexp(dim=0) - math.log(8 if self._kind == "flip_shift" else len(logs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _views(self, images: Tensor) -> tuple[Tensor, ...]:
        if self._kind == "flip":
            return images, images.flip(3)
        if self._kind == "flip_shift":
            return images, images.flip(3), *_shifted(images)
        from torchvision.transforms.v2 import functional

        cut = functional.five_crop if self._kind == "five_crop" else functional.ten_crop
        views: tuple[Tensor, ...] = cut(images, [self._side, self._side])
        return views


def _shifted(images: Tensor) -> tuple[Tensor, ...]:
    """The images moved by a pixel to the lower right and the upper left, reflected at the edge, and their mirrors."""
    height, width = images.shape[-2:]
    padded = pad(images, (1, 1, 1, 1), mode="reflect")
    moved = (padded[:, :, at : at + height, at : at + width] for at in (0, 2))
    return tuple(view for each in moved for view in (each, each.flip(3)))


def shown_for_crops(data: Data, side: int, kind: str) -> Data:
    """How images must be shown so that crops of ``side`` pixels can be cut from their corners and their centre.

    As Krizhevsky et al.: the central square of the image, not cropped to the crop's size yet.

    Raises:
        RecipeError: If nothing is left beside the centre, or images are no squares.
    """
    whole = round(side / data.evaluation_crop)
    if data.evaluation_shape != "square":
        raise RecipeError(
            f"evaluate.augment={kind} cuts its crops from a square, and data.evaluation_shape={data.evaluation_shape}; "
            "use one of the two, or evaluate.augment=flip."
        )
    if whole == side:
        raise RecipeError(
            f"evaluate.augment={kind} has no effect: with data.evaluation_crop={data.evaluation_crop} all crops of "
            f"{side} pixels are the centre; give a smaller evaluation_crop, for example 0.875."
        )
    return replace(data, evaluation_size=whole, evaluation_crop=1.0)
