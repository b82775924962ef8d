"""Points in image files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn

from paceline.checkpoint.weights import SavedWeights
from paceline.data.image.decode import BrokenImageError, decode
from paceline.prediction.predictor import Answer, Predictor


@dataclass(frozen=True)
class Point(Answer):
    """A point in the picture's pixels."""

    x: float = 0.0
    y: float = 0.0

    def _found(self) -> str:
        return f"{self.x:.1f}, {self.y:.1f}"

    def _columns(self) -> dict[str, Any]:
        return {"x": self.x, "y": self.y}

    def drawn(self, prepared: Tensor, classes: Sequence[str]) -> Image.Image:
        """Return the picture with a cross."""
        picture = Image.fromarray((255 * prepared[0]).to(torch.uint8).numpy()).convert("RGB")
        pen = ImageDraw.Draw(picture)
        pen.line((self.x - 2, self.y, self.x + 2, self.y), fill="red")
        pen.line((self.x, self.y - 2, self.x, self.y + 2), fill="red")
        return picture


class KeypointPredictor(Predictor):
    """A trained network, which answers image files of its size."""

    classes = ()
    number_names = ("x", "y")
    kind = Point
    draws = True

    def __init__(self, saved: SavedWeights, network: nn.Module, device: torch.device) -> None:
        self._saved, self._network, self._device = saved, network, device
        self._side = saved.description("data")["side"]

    def prepare(self, content: bytes) -> Tensor:
        """Return the picture, float32 [1, side, side]."""
        picture = torch.tensor(decode(content, 1)).permute(2, 0, 1) / 255
        if picture.shape[1:] != (self._side, self._side):
            raise BrokenImageError("", f"it must have {self._side}x{self._side} pixels")
        return picture

    @torch.inference_mode()
    def answer(self, prepared: Sequence[Tensor], top_k: int) -> list[Answer]:
        """Return the point of each picture."""
        points = self._side * self._network(torch.stack([*prepared]).to(self._device)).cpu()
        return [Point(Path(), x=x, y=y) for x, y in points.tolist()]
