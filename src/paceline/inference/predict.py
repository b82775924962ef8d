"""What do trained weights say about these images?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.checkpoint.components import check_inventory
from paceline.checkpoint.weights import SavedWeights, read_weights
from paceline.data.image.decode import BrokenImageError, decode
from paceline.data.image.folder import EXTENSIONS
from paceline.data.image.transforms import evaluation_image
from paceline.data.pipeline import Placement
from paceline.data.prefetch import Normalize
from paceline.errors import DataError
from paceline.models.build import build_model
from paceline.recipe.load import refuse_foreign_code, stored_recipe

_BATCH = 64


@dataclass(frozen=True)
class Prediction:
    """The answer for one image.

    Attributes:
        path: The image file.
        labels: Class names, the most probable first; empty if the image could not be read.
        probabilities: Their probabilities, in [0, 1].
        error: Why there is no answer, if there is none.
    """

    path: Path
    labels: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()
    error: str | None = None


class Predictor:
    """Trained weights with the preprocessing they were evaluated with; needs neither the recipe nor the data."""

    def __init__(self, saved: SavedWeights, device: torch.device, *, trust_code: bool = False) -> None:
        self._saved = saved
        self._device = device
        data = saved.described("data")
        self.classes: tuple[str, ...] = tuple(data["class_names"])
        self._size: int = data["image_size"]
        self._channels: int = data["channels"]
        self._crop: float = data["evaluation_crop"]
        self._normalize = Normalize(tuple(data["mean"]), tuple(data["std"]), Placement(device=device))
        self._network = self._build(trust_code=trust_code).to(device).eval()

    def predict(self, paths: Sequence[Path], *, top_k: int = 5) -> Iterator[Prediction]:
        """Yield one answer per file, in order; an unreadable file is an answer too."""
        for start in range(0, len(paths), _BATCH):
            yield from self._predict_batch(paths[start : start + _BATCH], min(top_k, len(self.classes)))

    @torch.inference_mode()
    def _predict_batch(self, paths: Sequence[Path], top_k: int) -> Iterator[Prediction]:
        images: dict[Path, torch.Tensor] = {}
        errors: dict[Path, str] = {}
        for path in paths:
            try:
                images[path] = evaluation_image(decode(path, self._channels), self._size, self._crop)
            except BrokenImageError as error:
                errors[path] = error.reason
        answers = self._score(images, top_k) if images else {}
        return iter([answers[path] if path in answers else Prediction(path, error=errors[path]) for path in paths])

    def _score(self, images: dict[Path, torch.Tensor], top_k: int) -> dict[Path, Prediction]:
        batch = self._normalize(torch.stack(list(images.values())).to(self._device))
        probabilities, labels = self._network(batch).float().softmax(dim=1).topk(top_k, dim=1)
        rows = zip(images, probabilities.tolist(), labels.tolist(), strict=True)
        return {
            path: Prediction(path, tuple(self.classes[label] for label in top), tuple(values))
            for path, values, top in rows
        }

    def _build(self, *, trust_code: bool) -> nn.Module:
        tree, where = self._saved.described("recipe"), str(self._saved.path)
        recipe = stored_recipe(tree, where)
        refuse_foreign_code({"model": tree.get("model", {})}, recipe, where, trusted=trust_code)
        model = replace(recipe.model, pretrained=False, initialize_from=None)
        network = build_model(model, num_classes=len(self.classes), in_channels=self._channels)
        check_inventory(network.state_dict(), self._saved.state, where=str(self._saved.path))
        network.load_state_dict(self._saved.state)
        return network


def load_predictor(
    target: Path,
    *,
    weights: str = "auto",
    best: bool = False,
    trust_code: bool = False,
    device: torch.device | None = None,
) -> Predictor:
    """Load weights for prediction from a run directory, a checkpoint or a safetensors file.

    Args:
        target: Where the weights are.
        weights: ``auto`` (the moving average where there is one), ``model`` or ``ema``.
        best: In a run directory, take the best checkpoint instead of the newest.
        trust_code: Whether the weights' recipe may name code to import.
        device: Where to compute; the CPU by default.

    Raises:
        PacelineError: If the target is not usable.
    """
    saved = read_weights(target, weights, best=best)
    described: dict[str, Any] = saved.described("data")
    if "class_names" not in described:
        raise DataError(
            f"{saved.path} holds no class names: its task does not label images, so it cannot predict them."
        )
    return Predictor(saved, device or torch.device("cpu"), trust_code=trust_code)


def image_files(sources: Sequence[Path]) -> list[Path]:
    """The image files meant by files and folders (searched through), in order.

    Raises:
        DataError: If a source does not exist, or a folder holds no image.
    """
    found: list[Path] = []
    for source in sources:
        if source.is_file():
            found.append(source)
        elif source.is_dir():
            inside = sorted(
                path
                for path in source.rglob("*")
                if path.suffix.lower().removeprefix(".") in EXTENSIONS and path.is_file()
            )
            if not inside:
                raise DataError(
                    f"'{source}' holds no image; files with these endings are read: {', '.join(EXTENSIONS)}."
                )
            found += inside
        else:
            raise DataError(f"'{source}' does not exist; give image files or folders of them.")
    return found
