"""Draw objects into pictures, for the report and for predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.metrics.answers import THUMBNAIL_PIXELS

# Okabe and Ito's palette, which colour-blind readers can distinguish.
_COLOURS = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7")


def device_of(model: Any) -> torch.device:
    """Return the device of a network, or of a wrapper of one."""
    device: torch.device = next(next(iter(model.modules())).parameters()).device
    return device


def draw_objects(
    picture: Tensor, classes: Sequence[int], *, masks: Tensor | None = None, boxes: Tensor | None = None
) -> Tensor:
    """Return a picture, uint8 [3, H, W], with its M objects in the colours of their classes.

    Args:
        picture: The picture to draw into.
        classes: Class of each object.
        masks: Pixels of the objects, [M, H, W].
        boxes: Left, top, right and bottom of each, [M, 4].
    """
    from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

    if not classes:
        return picture
    colours: list[str | tuple[int, int, int]] = [_COLOURS[each % len(_COLOURS)] for each in classes]
    if masks is not None:
        picture = draw_segmentation_masks(picture, masks.bool(), alpha=0.5, colors=colours)
    if boxes is not None:
        # As wide as a pixel after the picture is shrunk.
        width = max(1, round(max(picture.shape[1:]) / THUMBNAIL_PIXELS))
        picture = draw_bounding_boxes(picture, boxes, colors=colours, width=width)
    return picture
