"""How does a detector prepare pictures, where the recipe says how large they are shown?"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from paceline.recipe.boxes import Boxes


class ShownPictures(GeneralizedRCNNTransform):  # type: ignore[misc]  # torchvision has no types
    """A detector's own preparation with the recipe's sizes: normalises, and in evaluation resizes, and answers back.

    Training pictures come as they are to be shown: their sizes are drawn by (seed, epoch, sample).
    """

    def __init__(self, own: Any, boxes: Boxes) -> None:
        largest = max(boxes.short_sides or (boxes.long_side,))
        super().__init__(largest, boxes.long_side, own.image_mean, own.image_std, size_divisible=own.size_divisible)
        self.is_fixed = boxes.short_sides is None

    def resize(self, image: Tensor, target: dict[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor] | None]:
        """Resize a held-out picture [C, H, W] and its objects."""
        if self.training or self.is_fixed:
            return image, target
        resized: tuple[Tensor, dict[str, Tensor] | None] = super().resize(image, target)
        return resized
