"""Several views of each image, whose predictions are averaged: test-time augmentation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import RecipeError
from paceline.recipe.data import Data

CROPS = ("five_crop", "ten_crop")


class AveragedViews:
    """A network's mean prediction over several views of each image: test-time augmentation.

    Probabilities are averaged, as Krizhevsky et al. (2012) do over ten crops and Simonyan and Zisserman (2014) over an
    image and its mirror; Jordan (arXiv:2404.00498, 2024) adds both shifted by a pixel in either direction. Returns the
    logarithm of the mean, which is scored like any logits and whose cross-entropy is that of the mean.

    Args:
        model: The network: images [N, C, H, W] to logits [N, classes].
        kind: ``flip``, ``flip_shift``, ``five_crop`` or ``ten_crop``.
        side: Height and width of a crop in pixels.
    """

    def __init__(self, model: Callable[..., Any], kind: str, side: int) -> None:
        self._model = model
        self._kind = kind
        self._side = side

    def __call__(self, images: Tensor) -> Tensor:
        """Return the logarithm of the mean probabilities, float32 [N, classes]."""
        # Keep the memory format: another one would recompile a compiled network.
        is_last = images.is_contiguous(memory_format=torch.channels_last)
        memory_format = torch.channels_last if is_last else torch.contiguous_format
        views = (view.contiguous(memory_format=memory_format) for view in self._views(images))
        logs = [self._model(view).float().log_softmax(dim=1) for view in views]
        if self._kind == "flip_shift":
            # The image and its mirror together weigh as much as the four shifted views.
            logs[:2] = [each + math.log(2) for each in logs[:2]]
        return torch.stack(logs).logsumexp(dim=0) - math.log(8 if self._kind == "flip_shift" else len(logs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _views(self, images: Tensor) -> tuple[Tensor, ...]:
        if self._kind in CROPS:
            from torchvision.transforms.v2 import functional

            views: tuple[Tensor, ...] = getattr(functional, self._kind)(images, [self._side, self._side])
            return views
        shown = [images]
        if self._kind == "flip_shift":
            # Shifted by a pixel to the lower right and the upper left, with reflection padding.
            height, width = images.shape[-2:]
            padded = F.pad(images, (1, 1, 1, 1), mode="reflect")
            shown += (padded[:, :, offset : offset + height, offset : offset + width] for offset in (0, 2))
        return tuple(view for each in shown for view in (each, each.flip(3)))


def scale_for_crops(data: Data, side: int, kind: str) -> Data:
    """Return the preprocessing from which crops of ``side`` pixels can be cut at the corners and the centre.

    As Krizhevsky et al.: the central square of the image, before cropping.

    Raises:
        RecipeError: If no border is left around the centre crop, or images are not square.
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
