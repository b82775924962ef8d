"""What do trained weights say about these images?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.checkpoint.components import check_inventory
from paceline.checkpoint.weights import SavedWeights, read_weights
from paceline.data.image.datasets import ImageDataset
from paceline.data.image.decode import BrokenImageError, decode, upright_size
from paceline.data.image.folder import EXTENSIONS
from paceline.data.image.shapes import rectangle
from paceline.data.image.source import ArraySource
from paceline.data.image.transforms import Shape, evaluation_image
from paceline.data.pipeline import Placement
from paceline.data.prefetch import Normalize
from paceline.errors import DataError, RecipeError
from paceline.inference.detection import DetectionPredictor
from paceline.recipe.load import refuse_foreign_code, stored_recipe
from paceline.recipe.schema import Recipe
from paceline.references import is_reference
from paceline.tasks.averaging import CROPS, shown_for_crops
from paceline.tasks.build import TASKS, build_task, task_name
from paceline.tasks.image_classification import ImageClassification
from paceline.tasks.task import Task
from paceline.world import World

_BATCH = 64

TaskMaker = Callable[[Recipe], Task]


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

    def described(self) -> str:
        """The answer as one line for people, without the path."""
        if self.error is not None:
            return f"unreadable: {self.error}"
        pairs = zip(self.labels, self.probabilities, strict=True)
        return "  ".join(f"{label} {100 * value:.1f} %" for label, value in pairs)


class Predictor:
    """Trained weights with the preprocessing they were evaluated with; needs no file but the weights' own.

    Args:
        saved: The weights; their file says which task built their network, and how images were shown.
        device: Where to compute.
        make_task: Makes that task.
    """

    usual_top_k = 3

    def __init__(self, saved: SavedWeights, device: torch.device, make_task: TaskMaker) -> None:
        self._saved = saved
        self._device = device
        data = saved.described("data")
        self.classes: tuple[str, ...] = tuple(data["class_names"])
        self._size: int = data["image_size"]
        self._shown_size: int = data.get("evaluation_size", self._size)
        self._channels: int = data["channels"]
        self._crop: float = data["evaluation_crop"]
        self._interpolation: str = data.get("interpolation", "bilinear")
        # Only where images keep their aspect ratio.
        self._multiple: int | None = data.get("evaluation_multiple")
        self._normalize = Normalize(tuple(data["mean"]), tuple(data["std"]), Placement(device=device))
        task = self._task(make_task)
        self._network = self._build(task).to(device).eval()
        self._answers = task.evaluated(self._network)
        if (kind := task.recipe.evaluate.augment) in CROPS:
            shown = shown_for_crops(task.recipe.data, self._shown_size, kind)
            self._shown_size, self._crop = int(shown.evaluation_size), shown.evaluation_crop

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
                images[path] = evaluation_image(
                    decode(path, self._channels), self._shape_of(path), self._crop, self._interpolation
                )
            except BrokenImageError as error:
                errors[path] = error.reason
        answers: dict[Path, Prediction] = {}
        for shape in {tuple(image.shape) for image in images.values()}:
            alike = {path: image for path, image in images.items() if tuple(image.shape) == shape}
            answers |= self._score(alike, top_k)
        return iter([answers[path] if path in answers else Prediction(path, error=errors[path]) for path in paths])

    def _shape_of(self, path: Path) -> Shape:
        """Height and width at which an image is shown; the same as in evaluation."""
        size = self._shown_size
        if self._multiple is None or (found := upright_size(path)) is None:
            return size, size
        return rectangle(*found, size=size, multiple=self._multiple)

    @property
    def network(self) -> nn.Module:
        """The network, in evaluation on the device."""
        return self._network

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width at which square images are shown."""
        return self._channels, self._shown_size, self._shown_size

    def probabilities(self, images: torch.Tensor) -> torch.Tensor:
        """The probabilities of the classes, float32 [N, classes] on the device.

        Args:
            images: Decoded and of the size that is shown, uint8 [N, C, H, W], anywhere.
        """
        batch = self._normalize(images.to(self._device, non_blocking=True))
        answers: torch.Tensor = self._answers(batch).float().softmax(dim=1)
        return answers

    def _score(self, images: dict[Path, torch.Tensor], top_k: int) -> dict[Path, Prediction]:
        probabilities, labels = self.probabilities(torch.stack(list(images.values()))).topk(top_k, dim=1)
        rows = zip(images, probabilities.tolist(), labels.tolist(), strict=True)
        return {
            path: Prediction(path, tuple(self.classes[label] for label in top), tuple(values))
            for path, values, top in rows
        }

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
        if isinstance(task, ImageClassification):
            # What its data would say of the network; the data themselves may be far away.
            task.dataset = self._described_dataset()
        else:
            task.data_facts(World())
        return task

    def _build(self, task: Task) -> nn.Module:
        network = task.build_model()
        task.check_network(network)
        check_inventory(network.state_dict(), self._saved.plain, where=str(self._saved.path))
        network.load_state_dict(self._saved.plain)
        return network

    def _described_dataset(self) -> ImageDataset:
        data = self._saved.described("data")
        none = ArraySource(
            np.empty((0, self._size, self._size, self._channels), dtype=np.uint8), np.empty(0, dtype=np.int64), "none"
        )
        return ImageDataset(
            name=data["dataset"],
            train=none,
            validation=none,
            classes=self.classes,
            channels=self._channels,
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
        if recipe.task in TASKS and trained not in (None, task_name(build_task(recipe))):
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
    if "detects" in described:
        raise DataError(
            f"{saved.path} holds a detector, which finds objects and labels no images; use paceline predict."
        )
    if "class_names" not in described:
        raise DataError(
            f"{saved.path} holds no class names: its task does not label images, so it cannot predict them."
        )
    make_task = trained_task(saved, trust_code=trust_code) if task is None else task
    return Predictor(saved, device or torch.device("cpu"), make_task)


def open_predictor(
    target: Path, *, weights: str = "auto", best: bool = False, trust_code: bool = False, device: torch.device
) -> Predictor | DetectionPredictor:
    """Load weights that label images, or find objects in them; arguments as for :func:`load_predictor`."""
    saved = read_weights(target, weights, best=best)
    if "detects" in saved.described("data"):
        return DetectionPredictor(saved, device, trust_code=trust_code)
    return load_predictor(target, weights=weights, best=best, trust_code=trust_code, device=device)


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
                    f"'{source}' holds no image; files with these endings are read: {', '.join(EXTENSIONS)}. Lines of "
                    "samples (.tsv, .txt, .jsonl) are given file by file."
                )
            found += inside
        else:
            raise DataError(
                f"'{source}' does not exist; give image files or folders of them, or files of lines (.tsv, .txt, "
                ".jsonl) to a recommendation task."
            )
    return found
