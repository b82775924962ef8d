"""Object detection in pictures with trained weights, including boxes."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import nn

from paceline.checkpoint.durable import hash_file
from paceline.checkpoint.weights import SavedWeights
from paceline.data.image.decode import BrokenImageError, decode
from paceline.data.image.pillow_pixels import LARGEST_PIXELS, Pixels
from paceline.errors import CheckpointError
from paceline.prediction.predictor import NOT_FINITE, Answer, Box, Predictor
from paceline_vision.detection.pipeline import as_floats, as_tensor

_MIN_SCORE = 0.5
_OPACITY = 110  # of 255
# Bright colours, far apart on the colour circle; classes cycle through them.
_COLOURS = ("#ff4b4b", "#3fd0ff", "#ffd23f", "#7dff6a", "#ff7bf0", "#ffa04b", "#8ea2ff", "#ffffff")


@dataclass(frozen=True)
class Detections(Answer):
    """The detections in one picture, by descending score; may be empty.

    Attributes:
        boxes: Left, top, right and bottom edge of each, in pixels of the original picture.
        masks: Masks, float32 [N, 1, M, M] in [0, 1] on the CPU, if the network predicts them: the content of each box
            on an M x M grid.
        size: Height and width of the original picture.
    """

    per_label = MappingProxyType({"boxes": ("left", "top", "right", "bottom")})
    boxes: tuple[Box, ...] = ()
    masks: torch.Tensor | None = field(default=None, repr=False, compare=False)
    size: tuple[int, int] = field(default=(0, 0), repr=False, compare=False)

    def _found(self) -> str:
        rows = zip(self.labels, self.probabilities, self.boxes, strict=True)
        said = (f"{label} {100 * sure:.1f} % ({', '.join(f'{edge:.0f}' for edge in box)})" for label, sure, box in rows)
        return "  ".join(said) or f"nothing of {100 * _MIN_SCORE:.0f} % or more"

    def _columns(self) -> dict[str, Any]:
        return {**super()._columns(), "boxes": self.boxes}

    def drawn(self, prepared: Pixels, classes: Sequence[str]) -> Image.Image:
        """Return the picture, uint8 [H, W, 3], with boxes and any masks."""
        picture = Image.fromarray(prepared)
        if (overlay := self.overlay(max(picture.size), classes)) is not None:
            picture = Image.alpha_composite(picture.convert("RGBA"), overlay).convert("RGB")
        pen = ImageDraw.Draw(picture)
        for colour, box, label in zip(self._colours(classes), self.boxes, self.labels, strict=True):
            pen.rectangle(box, outline=colour)
            pen.text((box[0] + 2, box[1] + 1), label, fill=colour)
        return picture

    def overlay(self, longest: int, classes: Sequence[str]) -> Image.Image | None:
        """Return the masks in half-transparent colours; None without masks."""
        if self.masks is None:
            return None
        shrink = min(1.0, longest / max(self.size))
        height, width = (max(1, round(shrink * side)) for side in self.size)
        picture = Image.new("RGBA", (width, height))
        for number, colour in enumerate(self._colours(classes)):
            mask = Image.fromarray(self._mask(number, (height, width), shrink).numpy(), mode="L")
            picture.paste(Image.new("RGBA", picture.size, f"{colour}{_OPACITY:02x}"), mask=mask)
        return picture

    def _colours(self, classes: Sequence[str]) -> list[str]:
        return [_COLOURS[classes.index(label) % len(_COLOURS)] for label in self.labels]

    def _mask(self, number: int, size: tuple[int, int], shrink: float) -> torch.Tensor:
        """Return one object's pixels in a picture of this size, uint8 [H, W], 0 or 255."""
        from torchvision.models.detection.roi_heads import paste_masks_in_image

        assert self.masks is not None
        index = slice(number, number + 1)
        boxes = shrink * torch.tensor(self.boxes[index])
        pasted: torch.Tensor = paste_masks_in_image(self.masks[index], boxes, size)
        return (pasted[0, 0] >= _MIN_SCORE).to(torch.uint8) * 255


class DetectionPredictor(Predictor):
    """A trained detector.

    Args:
        saved: The weights.
        network: The network with these weights, in evaluation mode on the device.
        classes: All class names.
        device: Where to compute.
    """

    usual_top_k = sys.maxsize  # all that the network keeps
    # In a batch with larger pictures a picture is padded, which changes its detections.
    largest_batch = 1
    holds = "a detector"
    draws = True
    kind = Detections

    def __init__(self, saved: SavedWeights, network: nn.Module, classes: tuple[str, ...], device: torch.device) -> None:
        from paceline_vision.detection.shown_pictures import FixedSizeTransform

        self.classes = classes
        # Most detections have low scores, and few masks are drawn, so masks are pasted only when drawn.
        if isinstance(network.transform, FixedSizeTransform):
            network.transform.pastes_masks = False
        self._network = network
        self._is_finite: list[torch.Tensor] = []
        # torchvision silently drops boxes with a non-finite score. So the layers that score and place boxes are
        # checked; earlier overflows reach them.
        for name, layer in network.named_modules():
            if isinstance(layer, nn.Conv2d | nn.Linear) and not name.startswith("backbone."):
                layer.register_forward_hook(self._note)
        self._device = device
        self._saved = saved

    def prepare(self, content: bytes) -> Pixels:
        """Decode one image file, uint8 [H, W, 3].

        Raises:
            BrokenImageError: If it cannot be read.
        """
        pixels = decode(content, 3)
        transform: Any = self._network.transform
        height, width = (-(-side // transform.size_divisible) * transform.size_divisible for side in pixels.shape[:2])
        if transform.is_fixed and height * width > LARGEST_PIXELS:
            raise BrokenImageError(
                "", f"{width}x{height} pixels with its margin for this network; at most {LARGEST_PIXELS:,} are shown"
            )
        return pixels

    def answer(self, prepared: Sequence[Pixels], top_k: int) -> list[Answer]:
        """Return one prediction per picture, in order, without paths; each picture is processed alone."""
        return [self._answer(pixels, top_k) for pixels in prepared]

    def _answer(self, pixels: Pixels, top_k: int) -> Answer:
        output = self._found(pixels)
        if output is None:
            return self.unreadable(Path(), NOT_FINITE)
        # Detections more likely than not, by descending score.
        order = output["scores"].sort(descending=True, stable=True).indices
        selected = order[output["scores"][order] >= _MIN_SCORE][:top_k]
        output = {name: each[selected].cpu() for name, each in output.items()}
        boxes: list[Any] = [tuple(round(edge, 2) for edge in box) for box in output["boxes"].tolist()]
        return Detections(
            Path(),
            tuple(self.classes[label] for label in output["labels"].tolist()),
            tuple(output["scores"].tolist()),
            boxes=tuple(boxes),
            masks=output.get("masks"),
            size=(pixels.shape[0], pixels.shape[1]),
        )

    @torch.inference_mode()
    def _found(self, pixels: Pixels) -> Mapping[str, torch.Tensor] | None:
        """Return boxes in pixels of the picture, labels from 0, scores and any masks; None if it is not finite."""
        self._is_finite.clear()
        output: dict[str, torch.Tensor] = self._network(as_floats([as_tensor(pixels).to(self._device)]))[0]
        return {**output, "labels": output["labels"] - 1} if bool(torch.stack(self._is_finite).all()) else None

    def _note(self, _: nn.Module, __: Any, scores: torch.Tensor) -> None:
        self._is_finite.append(scores.isfinite().all())


class ExportedDetector(DetectionPredictor):
    """A detector that ``paceline export`` wrote, for pictures of one size.

    Args:
        saved: The file's description.
        run: Returns its outputs by name.
    """

    def __init__(self, saved: SavedWeights, run: Callable[[torch.Tensor], Mapping[str, torch.Tensor]]) -> None:
        from paceline_vision.detection.exported import Canvas

        data = saved.description("data")
        try:
            self.classes, self._canvas = tuple(data["class_names"]), Canvas(**data["picture"])
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"{saved.path} does not say how to prepare pictures ({error}); export it again."
            ) from error
        self._run, self._saved = run, saved

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file."""
        return hash_file(self._saved.path, hashlib.sha256).digest

    def prepare(self, content: bytes) -> Pixels:
        """Decode one image file, uint8 [H, W, 3]; raises BrokenImageError if it cannot be read."""
        return decode(content, 3)

    def _found(self, pixels: Pixels) -> Mapping[str, torch.Tensor] | None:
        output = dict(self._run(self._canvas.prepared(pixels)))
        output["boxes"] = self._canvas.in_picture(output["boxes"], pixels.shape[0], pixels.shape[1])
        if "masks" in output:
            output["masks"] = output["masks"][:, None]
        return output if bool(output["boxes"].isfinite().all()) else None
