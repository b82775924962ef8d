"""The class of each pixel of images, by trained weights."""

from __future__ import annotations

import colorsys
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from paceline.checkpoint.weights import SavedWeights, check_scale, load_trained, weights_sha256
from paceline.data.boxes.pipeline import as_tensor
from paceline.data.image.decode import Pixels, decode
from paceline.data.masks.pipeline import IGNORED, LabelMap, fill_of, fitted, fitted_size
from paceline.data.pipeline import Normalize, Placement
from paceline.inference.answers import NOT_FINITE, error_in_words
from paceline.models.segmentation import LogitsOnly, build_segmenter
from paceline.recipe.load import stored_recipe
from paceline.recipe.named_code import refuse_foreign_code

_TURN = 0.618034  # of the colour circle from one class to the next, so that neighbours differ


@dataclass(frozen=True)
class Segments:
    """The answer for one image.

    Attributes:
        path: The image file.
        labels: Class names, the largest first; empty if the image could not be read.
        probabilities: The share of the pixels that each has, in [0, 1].
        error: Why there is no answer, if there is none.
        classes: The class of each pixel of the file's image, uint8 [H, W].
    """

    path: Path
    labels: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()
    error: str | None = None
    classes: LabelMap | None = field(default=None, repr=False, compare=False)

    def at(self, path: Path) -> Segments:
        """The same answer, for that path."""
        return replace(self, path=path)

    def described(self) -> str:
        """The answer as one line for people, without the path."""
        if self.error is not None:
            return error_in_words(self.error)
        pairs = zip(self.labels, self.probabilities, strict=True)
        return "  ".join(f"{label} {100 * share:.1f} %" for label, share in pairs)

    def row(self) -> dict[str, Any]:
        """The answer as a row of a file."""
        found = {"labels": self.labels, "probabilities": self.probabilities}
        return {"path": self.path, **found, "error": self.error}

    def drawn(self, prepared: Pixels, classes: Sequence[str]) -> Image.Image:
        """The label map, as data.dataset=masks reads it: values are class indices, shown in colours."""
        assert self.classes is not None
        colours = (colorsys.hsv_to_rgb(_TURN * each % 1, 0.75, 0.95) for each in range(1, len(classes)))
        found = Image.fromarray(self.classes, mode="P")
        found.putpalette([0, 0, 0, *(round(255 * each) for each in itertools.chain.from_iterable(colours))])
        return found


class SegmentationPredictor:
    """A trained segmentation network; needs no file but the weights' own.

    Args:
        saved: The weights; their file says how their network was built, and how images were shown.
        device: Where to compute.
        trust_code: Whether the weights' recipe may name code to import.
    """

    usual_top_k = IGNORED
    largest_batch: int | None = 4  # images wait at their full size
    number_names: tuple[str, ...] = ()
    finds_boxes = False
    draws = True

    def __init__(self, saved: SavedWeights, device: torch.device, *, trust_code: bool = False) -> None:
        where, data = str(saved.path), saved.described("data")
        recipe = stored_recipe(saved.described("recipe"), where)
        check_scale(data, where)
        self.classes: tuple[str, ...] = tuple(data["class_names"])
        refuse_foreign_code({"model": saved.described("recipe").get("model", {})}, recipe, where, trusted=trust_code)
        # The weights come from the file: nothing is downloaded or initialised from elsewhere.
        model = replace(recipe.model, pretrained=False, initialize_from=None)
        network = build_segmenter(model, num_classes=len(self.classes))
        load_trained(network, saved)
        self.network: nn.Module = LogitsOnly(network).to(device).eval()
        self.size = int(data["evaluation_size"])
        self._fill, self._interpolation = fill_of(data["mean"]), str(data["interpolation"])
        self._normalize = Normalize(tuple(data["mean"]), tuple(data["std"]), Placement(device=device))
        self._device = device
        self._saved = saved

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the weights, as ``summary.json`` has it."""
        return weights_sha256(self._saved.state)

    def prepare(self, content: bytes) -> Pixels:
        """Decode one image file, uint8 [H, W, 3].

        Raises:
            BrokenImageError: If it cannot be read.
        """
        return decode(content, 3)

    @torch.inference_mode()
    def answer(self, prepared: Sequence[Pixels], top_k: int) -> list[Segments]:
        """One answer for each image, in order, without paths; shown as in evaluation."""
        shown = [fitted(as_tensor(each), self.size, self._fill, self._interpolation) for each in prepared]
        logits = self.network(self._normalize(torch.stack(shown).to(self._device))).float()
        return [
            self._read(each, (pixels.shape[0], pixels.shape[1]), top_k)
            for each, pixels in zip(logits, prepared, strict=True)
        ]

    def unreadable(self, path: Path, reason: str) -> Segments:
        """The answer for an image that cannot be read."""
        return Segments(path, error=reason)

    def _read(self, logits: Tensor, size: tuple[int, int], top_k: int) -> Segments:
        (height, width), (rows, columns) = size, fitted_size(*size, self.size)
        logits = logits[:, :rows, :columns]
        if not bool(logits.isfinite().all()):
            return self.unreadable(Path(), NOT_FINITE)
        best = torch.full((height, width), -torch.inf, device=logits.device)
        found = torch.zeros((height, width), dtype=torch.uint8, device=logits.device)
        # Class by class: the scores of all classes at a photograph's size would take gigabytes.
        for label, scores in enumerate(logits):
            larger = functional.interpolate(scores[None, None], (height, width), mode="bilinear")[0, 0]
            is_better = larger > best
            found[is_better], best = label, torch.maximum(best, larger)
        classes: LabelMap = found.cpu().numpy()
        shares = np.bincount(classes.ravel(), minlength=len(self.classes)) / classes.size
        order = [int(each) for each in np.argsort(-shares, kind="stable") if shares[each] > 0][:top_k]
        names = tuple(self.classes[each] for each in order)
        return Segments(Path(), names, tuple(shares[order].tolist()), classes=classes)
