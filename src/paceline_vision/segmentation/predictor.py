"""Pixel classes of images, predicted with trained weights."""

from __future__ import annotations

import colorsys
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torch.nn import functional

from paceline.checkpoint.weights import SavedWeights, check_scale
from paceline.data.batch import Normalize, Placement
from paceline.data.image.decode import BrokenImageError, decode
from paceline.data.image.pillow_pixels import Pixels
from paceline.prediction.predictor import NOT_FINITE, Answer, Predictor
from paceline_vision.detection.pipeline import as_tensor
from paceline_vision.segmentation.dataset import IGNORED, LabelMap
from paceline_vision.segmentation.networks import LogitsOnly
from paceline_vision.segmentation.pipeline import fill_of, fitted, fitted_size

_OPACITY, _LINE = 140, 12  # of 255; pixels from one name to the next
_TURN = 0.618034  # step on the colour circle between classes, so that neighbours differ


@dataclass(frozen=True)
class Segments(Answer):
    """The prediction for one image: its classes, largest first, with their shares of the pixels.

    Attributes:
        classes: Class of each pixel of the original image, uint8 [H, W].
    """

    measure = "share"
    classes: LabelMap | None = field(default=None, repr=False, compare=False)

    def _found(self) -> str:
        pairs = zip(self.labels, self.probabilities, strict=True)
        shares = (f"{f'class {label}' if label.isdigit() else label}: {100 * share:.1f} %" for label, share in pairs)
        return f"{', '.join(shares)} of the pixels"

    def drawn(self, prepared: Pixels, classes: Sequence[str]) -> Image.Image:
        """Return the image under the predicted classes, the first one transparent, with their names."""
        image = Image.fromarray(prepared).convert("RGBA")
        overlay = self.overlay(max(image.size), classes)
        assert overlay is not None
        image = Image.alpha_composite(image, overlay.convert("RGBA")).convert("RGB")
        pen, colours = ImageDraw.Draw(image), _palette(len(classes))
        for row, label in enumerate(each for each in self.labels if each != classes[0]):
            pen.text(
                (2, 1 + _LINE * row), label, fill=colours[classes.index(label)], stroke_width=1, stroke_fill="black"
            )
        return image

    def label_map(self, classes: Sequence[str]) -> Image.Image:
        """Return the label map in the format of data.dataset=masks: class indices with a colour palette."""
        assert self.classes is not None
        image = Image.fromarray(self.classes, mode="P")
        image.putpalette(list(itertools.chain.from_iterable(_palette(len(classes)))))
        return image

    def overlay(self, longest: int, classes: Sequence[str]) -> Image.Image | None:
        """Return the labels in half-transparent colours, the first class transparent; None without a prediction."""
        if self.classes is None:
            return None
        image = self.label_map(classes)
        image.thumbnail((longest, longest), Image.Resampling.NEAREST)
        image.info["transparency"] = bytes([0, *(_OPACITY * (each in self.labels) for each in classes[1:])])
        return image


def _palette(classes: int) -> list[tuple[int, int, int]]:
    """Return a colour for each class, far from its neighbours'; black for the first."""
    colours = (colorsys.hsv_to_rgb(_TURN * each % 1, 0.75, 0.95) for each in range(1, classes))
    return [(0, 0, 0), *((round(255 * r), round(255 * g), round(255 * b)) for r, g, b in colours)]


class SegmentationPredictor(Predictor):
    """A trained segmentation network.

    Args:
        saved: The weights; their file describes the preprocessing.
        network: The network with these weights, in evaluation mode on the device.
        device: Where to compute.
    """

    holds = "a segmentation network"
    usual_top_k = IGNORED
    largest_batch = 4  # queued images have their full size
    draws = True
    kind = Segments

    def __init__(self, saved: SavedWeights, network: nn.Module, device: torch.device) -> None:
        data = saved.description("data")
        check_scale(data, str(saved.path))
        self.classes, self.channels = tuple(data["class_names"]), int(data["channels"])
        self.network: nn.Module = LogitsOnly(network).eval()
        self.size = int(data["evaluation_size"])
        self._fill, self._interpolation = fill_of(data["mean"]), str(data["interpolation"])
        self._normalize = Normalize(tuple(data["mean"]), tuple(data["std"]), Placement(device=device))
        self._device = device
        self._saved = saved

    def prepare(self, content: bytes) -> Pixels:
        """Decode one image file, uint8 [H, W, 3].

        Raises:
            BrokenImageError: If it cannot be read.
        """
        if self.channels != 3:
            raise BrokenImageError("", f"image files have 3 channels, but the network takes {self.channels}")
        return decode(content, 3)

    @torch.inference_mode()
    def answer(self, prepared: Sequence[Pixels], top_k: int) -> list[Answer]:
        """Return one prediction per image, in order, without paths; preprocessed as in evaluation."""
        inputs = [fitted(as_tensor(each), self.size, self._fill, self._interpolation) for each in prepared]
        logits = self.network(self._normalize(torch.stack(inputs).to(self._device))).float()
        return [
            self._read(each, (pixels.shape[0], pixels.shape[1]), top_k)
            for each, pixels in zip(logits, prepared, strict=True)
        ]

    def _read(self, logits: Tensor, size: tuple[int, int], top_k: int) -> Answer:
        (height, width), (rows, columns) = size, fitted_size(*size, self.size)
        logits = logits[:, :rows, :columns]
        if not bool(logits.isfinite().all()):
            return self.unreadable(Path(), NOT_FINITE)
        best = torch.full((height, width), -torch.inf, device=logits.device)
        best_labels = torch.zeros((height, width), dtype=torch.uint8, device=logits.device)
        # One class at a time: the scores of all classes at a photograph's size would take gigabytes.
        for label, scores in enumerate(logits):
            larger = functional.interpolate(scores[None, None], (height, width), mode="bilinear")[0, 0]
            is_better = larger > best
            best_labels[is_better], best = label, torch.maximum(best, larger)
        classes: LabelMap = best_labels.cpu().numpy()
        shares = np.bincount(classes.ravel(), minlength=len(self.classes)) / classes.size
        order = [int(each) for each in np.argsort(-shares, kind="stable") if shares[each] > 0][:top_k]
        names = tuple(self.classes[each] for each in order)
        return Segments(Path(), names, tuple(shares[order].tolist()), classes=classes)
