"""Image predictions from trained weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.checkpoint.weights import SavedWeights, load_trained, read_weights
from paceline.data.image.datasets import ImageDataset
from paceline.data.image.source import ArraySource
from paceline.data.pipeline import Normalize, Placement
from paceline.errors import CheckpointError, DataError
from paceline.inference.answers import ImagePredictor
from paceline.inference.detection import DetectionPredictor
from paceline.inference.labelling import ImageLabeller, OnnxPredictor, Outputs, Preprocessing
from paceline.inference.segmentation import SegmentationPredictor
from paceline.inference.text import open_labeller
from paceline.inference.trained import TaskMaker, trained_recipe, trained_task
from paceline.tasks.image_classification import CROPS, ImageTask, scale_for_crops
from paceline.world import World


class Predictor(ImageLabeller):
    """Trained weights with the preprocessing of their evaluation; needs only the weights file.

    Args:
        saved: The weights; their file describes the task, the network and the preprocessing.
        device: Device.
        make_task: Creates that task.

    Raises:
        DataError: If they do not label images.

    Attributes:
        network: The network, in evaluation mode on the device.
    """

    def __init__(self, saved: SavedWeights, device: torch.device, make_task: TaskMaker) -> None:
        self._saved = saved
        self._device = device
        data = saved.description("data")
        outputs = Outputs.description(data)
        if outputs is None:
            raise DataError(
                f"{saved.path} holds no class names: its task does not classify images, so it cannot predict classes."
            )
        super().__init__(outputs, Preprocessing.description(data, str(saved.path)))
        self._normalize = Normalize(self.shown.mean, self.shown.std, Placement(device=device))
        task = make_task(trained_recipe(saved))
        # The size that the network was built for; inputs may have another.
        size, channels = data["image_size"], self.shown.channels
        if isinstance(task, ImageTask):
            # The data's facts about the network; the data themselves may be unavailable.
            none = ArraySource(np.empty((0, size, size, channels), dtype=np.uint8), np.empty(0, dtype=np.int64), "none")
            task.dataset = ImageDataset(
                name=data["dataset"],
                train=none,
                validation=none,
                classes=self.outputs.names,
                channels=channels,
                image_size=size,
                digest=data["digest"],
                mean=tuple(data["mean"]),
                std=tuple(data["std"]),
            )
        else:
            task.data_facts(World())
        network = task.build_model()
        task.check_network(network)
        load_trained(network, saved)
        self.network: nn.Module = network.to(device).eval()
        self._answers = task.evaluated(self.network)
        if (kind := task.recipe.evaluate.augment) in CROPS:
            scaled = scale_for_crops(task.recipe.data, self.shown.size, kind)
            self.shown = replace(self.shown, size=int(scaled.evaluation_size), crop=scaled.evaluation_crop)

    def probabilities(self, images: torch.Tensor) -> torch.Tensor:
        """Return class probabilities, float32 [N, classes] on the device; or the numbers, float64 [N, numbers].

        Args:
            images: Decoded and resized images, uint8 [N, C, H, W], on any device.
        """
        return self.outputs.read(self._answers(self._normalize(images.to(self._device, non_blocking=True))))


def load_predictor(
    target: Path,
    *,
    weights: str = "auto",
    best: bool = False,
    trust_code: bool = False,
    device: torch.device | None = None,
    task: TaskMaker | None = None,
) -> Predictor:
    """Load weights for prediction from a run directory, a checkpoint or a safetensors file.

    Args:
        target: Path of the weights.
        weights: ``auto`` (the moving average if there is one), ``model`` or ``ema``.
        best: In a run directory, take the best checkpoint instead of the newest.
        trust_code: Whether to import code named in the weights' recipe.
        device: Device; the CPU by default.
        task: Creates the task, instead of the one named in the weights.

    Raises:
        PacelineError: If the target is not usable.
    """
    saved = read_weights(target, weights, best=best)
    described: dict[str, Any] = saved.description("data")
    other_tasks = {"detects": "a detector", "labels_pixels": "a segmentation network", "tokenizer": "a network of text"}
    if refused := next((what for key, what in other_tasks.items() if key in described), None):
        raise DataError(f"{saved.path} holds {refused} and does not classify images; use paceline predict.")
    return Predictor(saved, device or torch.device("cpu"), task or trained_task(saved, trust_code=trust_code))


def open_predictor(
    target: Path, *, weights: str = "auto", best: bool = False, trust_code: bool = False, device: torch.device
) -> ImagePredictor:
    """Load weights that label images, pixels or texts, or detect objects; arguments as for :func:`load_predictor`.

    The target may also be an ONNX file from ``paceline export --format onnx``.
    """
    if target.suffix == ".onnx":
        if weights != "auto" or best:
            raise CheckpointError(
                f"'{target}' holds one set of weights: --weights and --best have no effect; leave them out."
            )
        return OnnxPredictor(target, device)
    saved = read_weights(target, weights, best=best)
    if "detects" in saved.description("data"):
        return DetectionPredictor(saved, device, trust_code=trust_code)
    if "labels_pixels" in saved.description("data"):
        return SegmentationPredictor(saved, device, trust_code=trust_code)
    if "tokenizer" in saved.description("data"):
        return open_labeller(saved, device, trust_code=trust_code)
    return Predictor(saved, device, trained_task(saved, trust_code=trust_code))
