"""Detection and segmentation: find objects in pictures, and the class of each pixel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline_vision.detection.dataset import BoxDataset
    from paceline_vision.segmentation.dataset import MaskDataset

__all__ = ["BoxDataset", "MaskDataset"]


def __getattr__(name: str) -> Any:
    if name == "BoxDataset":
        from paceline_vision.detection.dataset import BoxDataset

        return BoxDataset
    if name == "MaskDataset":
        from paceline_vision.segmentation.dataset import MaskDataset

        return MaskDataset
    raise AttributeError(f"module 'paceline_vision' has no attribute '{name}'")
