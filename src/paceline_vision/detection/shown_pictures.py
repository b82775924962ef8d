"""A detector's preprocessing of pictures, at the recipe's sizes.

This module imports torchvision; the rest of the package does so only when a detector is built.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from paceline.recipe.data import Boxes


class FixedSizeTransform(GeneralizedRCNNTransform):  # type: ignore[misc]  # torchvision has no types
    """torchvision's transform with the recipe's sizes: normalises; in evaluation also resizes and maps back.

    Training pictures arrive at their final size, drawn by (seed, epoch, sample). Only a network of one fixed size, such
    as an SSD, resizes them as well, to that size without regard to their aspect ratio.

    Attributes:
        pastes_masks: Whether masks are pasted at the picture's size. If not, each stays at the network's resolution
            within its box: a hundred masks of a large picture take gigabytes.
    """

    def __init__(self, own: Any, boxes: Boxes) -> None:
        largest = max(boxes.short_sides or (boxes.long_side,))
        super().__init__(largest, boxes.long_side, own.image_mean, own.image_std, size_divisible=own.size_divisible)
        self.networks_size: tuple[int, int] | None = own.fixed_size  # width and height
        self.is_fixed = boxes.short_sides is None and self.networks_size is None
        self.pastes_masks = True
        self.fixed_size = self.networks_size

    def torch_choice(self, k: tuple[int, ...]) -> int:
        """Return the one short side, which torchvision would draw."""
        return k[0]

    def resize(self, image: Tensor, target: dict[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor] | None]:
        """Resize a picture [C, H, W] and its objects, if it is held out or the network has a fixed size."""
        resized: tuple[Tensor, dict[str, Tensor] | None]
        if self.networks_size is not None:
            resized = super().resize(image, target)
            return resized
        if self.training or self.is_fixed:
            return image, target
        height, width = image.shape[1:]
        short, long = min(height, width), max(height, width)
        if short * self.max_size <= long:  # otherwise its shorter side would be rounded down to 0
            self.fixed_size = (self.max_size if width == long else 1, self.max_size if height == long else 1)
        resized = super().resize(image, target)
        self.fixed_size = None
        return resized

    def postprocess(
        self,
        result: list[dict[str, Tensor]],
        image_shapes: list[tuple[int, int]],
        original_image_sizes: list[tuple[int, int]],
    ) -> list[dict[str, Tensor]]:
        """Map detections back to the original picture sizes."""
        aside = [{} if self.pastes_masks else {"masks": each.pop("masks")} for each in result if "masks" in each]
        answers: list[dict[str, Tensor]] = super().postprocess(result, image_shapes, original_image_sizes)
        for each, masks in zip(answers, aside, strict=False):
            each.update(masks)
        return answers
