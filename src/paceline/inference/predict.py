"""Predictions of trained weights for images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.checkpoint.weights import SavedWeights, load_trained, read_weights, weights_sha256
from paceline.data.image.datasets import ImageDataset
from paceline.data.image.source import ArraySource
from paceline.data.pipeline import Normalize, Placement
from paceline.errors import CheckpointError, DataError, RecipeError
from paceline.inference.answers import ImagePredictor
from paceline.inference.detection import DetectionPredictor
from paceline.inference.labelling import ImageLabeller, OnnxPredictor, Outputs, Shown
from paceline.inference.segmentation import SegmentationPredictor
from paceline.models.build import check_takes
from paceline.recipe.load import stored_recipe
from paceline.recipe.named_code import refuse_foreign_code
from paceline.recipe.schema import Recipe
from paceline.references import is_reference
from paceline.registry import built_in
from paceline.tasks.image_classification import CROPS, ImageTask, shown_for_crops
from paceline.tasks.task import Task, build_task, task_name
from paceline.world import World

TaskMaker = Callable[[Recipe], Task]


class Predictor(ImageLabeller):
    """Trained weights with the preprocessing they were evaluated with; needs no file but the weights' own.

    Args:
        saved: The weights; their file says which task built their network, and how images were shown.
        device: Where to compute.
        make_task: Makes that task.
    """

    def __init__(self, saved: SavedWeights, device: torch.device, make_task: TaskMaker) -> None:
        self._saved = saved
        self._device = device
        data = saved.described("data")
        self.outputs = Outputs.described(data) or Outputs(())
        self.shown = Shown.described(data, str(saved.path))
        # The size that the network was built for; it may be shown another.
        self._size: int = data["image_size"]
        self._normalize = Normalize(self.shown.mean, self.shown.std, Placement(device=device))
        task = self._task(make_task)
        self._network = self._build(task).to(device).eval()
        self._answers = task.evaluated(self._network)
        if (kind := task.recipe.evaluate.augment) in CROPS:
            whole = shown_for_crops(task.recipe.data, self.shown.size, kind)
            self.shown = replace(self.shown, size=int(whole.evaluation_size), crop=whole.evaluation_crop)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the weights, as ``summary.json`` has it."""
        return weights_sha256(self._saved.state)

    @property
    def network(self) -> nn.Module:
        """The network, in evaluation on the device."""
        return self._network

    def probabilities(self, images: torch.Tensor) -> torch.Tensor:
        """The probabilities of the classes, float32 [N, classes] on the device; or the numbers, float64 [N, numbers].

        Args:
            images: Decoded and of the size that is shown, uint8 [N, C, H, W], anywhere.
        """
        return self.outputs.read(self._answers(self._normalize(images.to(self._device, non_blocking=True))))

    def _task(self, make_task: TaskMaker) -> Task:
        where = str(self._saved.path)
        recipe = stored_recipe(self._saved.described("recipe"), where)
        # The weights come from the file: nothing is downloaded or initialised from elsewhere.
        recipe = replace(
            recipe,
            model=replace(recipe.model, pretrained=False, initialize_from=None),
            distillation=replace(recipe.distillation, teacher=None),
        )
        task = make_task(recipe)
        if isinstance(task, ImageTask):
            # What its data would say of the network; the data themselves may be far away.
            task.dataset = self._described_dataset()
        else:
            task.data_facts(World())
        return task

    def _build(self, task: Task) -> nn.Module:
        network = task.build_model()
        task.check_network(network)
        if self._saved.metadata.get("shown_by") == "timm":
            # Described by others, who may name values at which a network is built, and answers nothing.
            check_takes(network, self._size, channels=self.shown.channels, name=task.recipe.model.name)
        load_trained(network, self._saved)
        return network

    def _described_dataset(self) -> ImageDataset:
        data = self._saved.described("data")
        none = ArraySource(
            np.empty((0, self._size, self._size, self.shown.channels), dtype=np.uint8),
            np.empty(0, dtype=np.int64),
            "none",
        )
        return ImageDataset(
            name=data["dataset"],
            train=none,
            validation=none,
            classes=self.outputs.names,
            channels=self.shown.channels,
            image_size=self._size,
            digest=data["digest"],
            mean=tuple(data["mean"]),
            std=tuple(data["std"]),
        )


def trained_task(saved: SavedWeights, *, trust_code: bool) -> TaskMaker:
    """What makes the task that weights were trained with.

    Raises:
        RecipeError: If that is code to import, and the user has not said that the file may name some; or if it cannot
            be imported.
    """

    def make(recipe: Recipe) -> Task:
        tree, where = saved.described("recipe"), str(saved.path)
        trained = saved.described("data").get("task")
        if recipe.task in built_in("tasks") and trained not in (None, task_name(build_task(recipe))):
            # Given in Python, so that the recipe does not name it.
            if not is_reference(trained):
                raise RecipeError(
                    f"the weights in {where} were trained with the task {trained}, which cannot be imported; make it "
                    "a class of its module, or give load_predictor(task=...)."
                )
            recipe = replace(recipe, task=trained)
        # The data set that the recipe names is not opened, so its code is not asked for.
        named = {"task": recipe.task, "model": tree.get("model", {})}
        refuse_foreign_code(named, recipe, where, trusted=trust_code)
        return build_task(recipe)

    return make


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
        target: Where the weights are.
        weights: ``auto`` (the moving average where there is one), ``model`` or ``ema``.
        best: In a run directory, take the best checkpoint instead of the newest.
        trust_code: Whether the weights' recipe may name code to import.
        device: Where to compute; the CPU by default.
        task: Makes the task, instead of the one that the weights name.

    Raises:
        PacelineError: If the target is not usable.
    """
    saved = read_weights(target, weights, best=best)
    described: dict[str, Any] = saved.described("data")
    if "detects" in described or "labels_pixels" in described:
        found = "a detector, which finds objects" if "detects" in described else "a network that labels pixels"
        raise DataError(f"{saved.path} holds {found} and labels no images; use paceline predict.")
    return _labeller(saved, device or torch.device("cpu"), task or trained_task(saved, trust_code=trust_code))


def _labeller(saved: SavedWeights, device: torch.device, make_task: TaskMaker) -> Predictor:
    if Outputs.described(saved.described("data")) is None:
        raise DataError(
            f"{saved.path} holds no class names: its task does not label images, so it cannot predict them."
        )
    return Predictor(saved, device, make_task)


def open_predictor(
    target: Path, *, weights: str = "auto", best: bool = False, trust_code: bool = False, device: torch.device
) -> ImagePredictor:
    """Load weights that label images or pixels, or find objects; arguments as for :func:`load_predictor`.

    Besides, the target may be an ONNX file as ``paceline export --format onnx`` writes it.
    """
    if target.suffix == ".onnx":
        if weights != "auto" or best:
            raise CheckpointError(
                f"'{target}' holds one set of weights: --weights and --best have no effect; leave them out."
            )
        return OnnxPredictor(target, device)
    saved = read_weights(target, weights, best=best)
    if "detects" in saved.described("data"):
        return DetectionPredictor(saved, device, trust_code=trust_code)
    if "labels_pixels" in saved.described("data"):
        return SegmentationPredictor(saved, device, trust_code=trust_code)
    return _labeller(saved, device, trained_task(saved, trust_code=trust_code))
