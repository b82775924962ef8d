"""Detection: boxes, classes and masks of the objects in a picture, with mean average precision.

This folder holds all that is particular to it: samples (``dataset.py``, ``pipeline.py``, ``plausibility.py`` and, by
name, ``paceline_vision/sets``), networks (``networks.py``, ``shown_pictures.py``, and ``fake_detections.py`` for
estimates), the metric (``average_precision.py``), and what finds objects with trained weights (``predictor.py``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.checkpoint.weights import SavedWeights
from paceline.data.batch import Batch
from paceline.data.image.datasets import content_of_files
from paceline.data.image.decode import BrokenImageError
from paceline.data.pipeline import Pipeline, Placement, reading_threads
from paceline.data.random_draws import derive_seed
from paceline.data.slices import evenly_spaced
from paceline.errors import DataError, ModelError, PacelineError, RecipeError, setting_error
from paceline.host.world import World
from paceline.metrics.accumulator import Collector, Metric
from paceline.plan import DataFacts
from paceline.plugins.dataset_registry import open_registered
from paceline.recipe.data import GeneratedBoxes
from paceline.recipe.schema import Recipe
from paceline.recipe.unused import all_but
from paceline.tasks.task import Model, Task
from paceline_vision.detection.average_precision import AveragePrecision
from paceline_vision.detection.dataset import BoxDataset, BoxSubset, read_fitting
from paceline_vision.detection.fake_detections import FakeDetections, fake_detections
from paceline_vision.detection.networks import build_detector, predicts_masks
from paceline_vision.detection.pipeline import BoxPipeline, as_tensor, scaled_sizes
from paceline_vision.drawing import device_of, draw_objects

if TYPE_CHECKING:
    from paceline.prediction.predictor import Predictor
    from paceline.tasks.exportable import Exportable

_USED = (
    *("data.dataset", "data.path", "data.workers", "data.prefetch", "data.on_bad", "data.max_broken"),
    *("data.detection", "data.annotations", "data.validation_fraction"),
)
_UNUSED_IN_TRAINING = ("train.loss", "train.loss_options", "train.label_smoothing", "train.target_threshold")
_NOT_COMPILED = "a batch is a list of pictures of many sizes, and each would need its own graph"
_NOT_SHARDED = (
    "does not work with task=detection: held-out pictures run one by one, not the same number in each process, and "
    "each pass would gather all processes' weights"
)
_FIGURES, _SHOWN_SCORE = 4, 0.5  # held-out pictures in the report, and the least score of what is drawn there
_MASK = 0.5  # probability from which a pixel belongs to an object


class Detection(Task):
    """Finds objects with torchvision's detectors, or any with the same interface.

    The loss is the sum of the losses that the network returns in training mode. A held-out picture's loss is computed
    for that picture alone.
    """

    headline = "box_map"
    can_shorten = True
    why_not_sharded = _NOT_SHARDED

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self._kinds = ("box", "mask") if self.has_masks else ("box",)
        self.metrics = (
            Metric(name="loss"),
            *(
                Metric(name=f"{kind}_{name}", higher_is_better=True, is_collected=True)
                for kind in self._kinds
                for name in ("map", "map50")
            ),
        )
        self._threads = 0

    @property
    def has_masks(self) -> bool:
        """Whether masks are trained."""
        requested, name = self.recipe.data.detection.masks, self.recipe.model.name
        return predicts_masks(name) if requested == "auto" else requested

    @cached_property
    def dataset(self) -> BoxDataset:
        """The pictures, opened on first use."""
        data = self.recipe.data
        data = replace(data, detection=replace(data.detection, masks=self.has_masks))
        return open_registered(data.dataset, {"boxes": BoxDataset}, data)

    def data_facts(self, world: World) -> DataFacts:
        """Open the pictures.

        Raises:
            RecipeError: If the recipe uses a feature that detectors do not support.
        """
        dataset = self.dataset
        if self.recipe.parallel.strategy == "fsdp":
            raise setting_error("parallel.strategy", "fsdp", f"{_NOT_SHARDED}; use parallel.strategy=ddp.")
        if self.recipe.model.compile:
            raise RecipeError(
                f"model.compile=true has no effect with task=detection: {_NOT_COMPILED}; set model.compile=false.",
                key="model.compile",
                value=True,
            )
        is_generated, workers = dataset.name == "shapes", self.recipe.data.workers
        self._threads, reason = reading_threads(workers, world)
        if workers == "auto" and is_generated:
            self._threads, reason = 0, "nothing is read"
        undefined = [self.leave_out_collected("no held-out picture has an object")] if dataset.is_unscored else []
        content, content_told = content_of_files(dataset.files, dataset.digest)
        return DataFacts(
            train_samples=len(dataset.train),
            evaluation_samples=len(dataset.validation),
            description={
                "dataset": dataset.name,
                "digest": dataset.digest,
                **({} if content is None else {"content_digest": content}),
                "classes": len(dataset.classes),
                "channels": 3,
                "workers": self._threads,
                "masks": self.has_masks,
                **dataset.facts,
            },
            reasons={
                "data.workers": reason,
                "data.detection.masks": "as the model's name says",
                **({"data.validation": dataset.split} if dataset.split else {}),
                **({"data.content_digest": content_told} if content_told else {}),
            },
            unused=self._unused(is_generated=is_generated),
            left_out=(*dataset.left_out, *undefined),
        )

    def sample_keys(self) -> NDArray[np.float64] | None:
        """Return the aspect ratio (width over height) of each picture, if micro-batches group similar pictures."""
        if not self.recipe.data.detection.like_shapes:
            return None
        height, width = self.dataset.train.sizes.T
        keys: NDArray[np.float64] = width / height
        return keys

    def sample_costs(self) -> NDArray[np.float64]:
        """Return the pixels of each picture at its training size."""
        areas: NDArray[np.float64] = self.sample_sizes().prod(axis=1).astype(np.float64)
        return areas

    def sample_sizes(self) -> NDArray[np.int64]:
        """Return height and width of each picture as shown in the first epoch."""
        return scaled_sizes(self.dataset.train.sizes, self.recipe.data.detection, self.recipe.seed)

    def description(self) -> dict[str, Any]:
        """Return class names, marked as classes of boxes rather than pictures."""
        return {"class_names": list(self.dataset.classes), "detects": list(self._kinds)}

    def open_pipeline(self, placement: Placement) -> Pipeline:
        """Open the pipeline of pictures with their objects."""
        data = self.recipe.data
        return BoxPipeline(
            self.dataset,
            data.detection,
            masks=self.has_masks,
            seed=self.recipe.seed,
            placement=placement,
            threads=self._threads,
            prefetch=data.prefetch,
        )

    def build_model(self) -> nn.Module:
        """Build the recipe's detector for the data's classes and the background."""
        return build_detector(self.recipe.model, self.recipe.data.detection, num_classes=len(self.dataset.classes))

    def check_network(self, network: nn.Module) -> None:
        """Check that the network predicts masks if and only if they are requested."""
        heads = getattr(network, "roi_heads", None)
        predicts_masks = heads is not None and bool(heads.has_mask())
        if predicts_masks != self.has_masks:
            raise ModelError(
                f"model.name={self.recipe.model.name} {'says' if predicts_masks else 'does not say'} masks, and "
                f"data.detection.masks={str(self.has_masks).lower()}; set it to {str(predicts_masks).lower()}, or use "
                "another model.",
                key="model.name",
                value=self.recipe.model.name,
            )

    def loss(self, model: Model, batch: Batch) -> Tensor:
        """Return the sum of the network's losses, each a mean as torchvision defines it."""
        return _total(model(batch.inputs, [trainable_boxes(each) for each in batch.targets]))

    def score(self, model: Model, batch: Batch) -> dict[str, Any]:
        """Return each picture's loss, detections and objects."""
        detections = _detections(model, batch)
        for each in detections:
            if "masks" in each:
                each["masks"] = each["masks"][:, 0] >= _MASK
        return {"loss": self._losses(model, batch), "found": detections, "truth": batch.targets}

    def predict(self, model: Model, batch: Batch) -> dict[str, Any]:
        """Return each picture's detections: boxes in pixels (left, top, right, bottom), classes from 0, scores."""
        detections = _detections(model, batch)
        return {
            "boxes": [each["boxes"] for each in detections],
            "labels": [each["labels"] - 1 for each in detections],
            "scores": [each["scores"] for each in detections],
        }

    def shown(self, batch: Batch) -> list[tuple[Tensor, str]]:
        """Return the pictures with boxes and masks drawn in, each with its class names."""
        return [
            self._drawn(image, trainable_boxes(target))
            for image, target in zip(batch.inputs, batch.targets, strict=True)
        ]

    def figures(self, model: Model) -> list[tuple[Tensor, str]]:
        """Return a few held-out pictures with their objects, each followed by the detections of 50 % or more."""
        source, pictures = self.dataset.validation, list[tuple[Tensor, str]]()
        for sample in evenly_spaced(len(source), _FIGURES).tolist():
            try:
                image = as_tensor(read_fitting(source, sample)).float() / 255
                objects = source.objects(sample, masks=self.has_masks).trainable(*image.shape[1:])
            except BrokenImageError:  # which the evaluation has reported
                continue
            truth = {"boxes": torch.tensor(objects.boxes), "labels": torch.tensor(objects.labels) + 1}
            if objects.masks is not None:
                truth["masks"] = torch.tensor(objects.masks)
            found = model([image.to(device_of(model))])[0]
            found = {name: each[found["scores"] >= _SHOWN_SCORE].float() for name, each in found.items()}
            if "masks" in found:
                found["masks"] = found["masks"][:, 0] >= _MASK
            name = os.path.basename(source.path(sample))
            for what, each in (("labelled", truth), ("detected", found)):
                picture, classes = self._drawn(image, each)
                pictures.append((picture, f"{name}, {what}: {classes or 'nothing'}"))
        return pictures

    def _drawn(self, image: Tensor, objects: dict[str, Tensor]) -> tuple[Tensor, str]:
        picture = (255 * image.cpu()).round().clamp(0, 255).to(torch.uint8)
        objects = {name: each.cpu() for name, each in objects.items()}
        classes = [int(each) - 1 for each in objects["labels"].tolist()]
        picture = draw_objects(picture, classes, masks=objects.get("masks"), boxes=objects["boxes"])
        return picture, ", ".join(self.dataset.classes[each] for each in sorted(set(classes)))

    def collectors(self) -> tuple[Collector, ...]:
        """Return the collector of mean average precision."""
        return (
            (AveragePrecision(self.dataset.classes, self._kinds),)
            if any(each.is_collected for each in self.metrics)
            else ()
        )

    def on_fake_tensors(self, networks: Sequence[nn.Module]) -> FakeDetections | None:
        """Return the context that assumes what a detector finds."""
        return fake_detections(*networks)

    def shorten(self, samples: int, evaluation_samples: int) -> None:
        """Reduce the pictures to a few."""
        dataset = self.dataset
        train, validation = (
            BoxSubset(source, evenly_spaced(len(source), count))
            for source, count in ((dataset.train, samples), (dataset.validation, evaluation_samples))
        )
        self.dataset = replace(dataset, train=train, validation=validation, files=())

    def recall(self, saved: SavedWeights) -> None:
        """Take the classes from the description; no picture is read."""
        described = saved.description("data")
        nothing: Any = ()  # no sample is requested
        self.dataset = BoxDataset(
            name=described["dataset"],
            train=nothing,
            validation=nothing,
            classes=tuple(described["class_names"]),
            digest=described["digest"],
        )

    def predictor(self, saved: SavedWeights, device: torch.device) -> Predictor:
        """Return what finds objects in pictures."""
        # Imported only where used: training needs none of it.
        from paceline_vision.detection.predictor import DetectionPredictor

        return DetectionPredictor(saved, self.trained(saved, device), self.dataset.classes, device)

    def exported_predictor(self, saved: SavedWeights, run: Callable[[Tensor], Mapping[str, Tensor]]) -> Predictor:
        """Return what finds objects in pictures with an exported detector."""
        from paceline_vision.detection.predictor import ExportedDetector

        return ExportedDetector(saved, run)

    def exportable(self, saved: SavedWeights, target: str) -> Exportable:
        """Return the network for pictures of one size; the data is opened, to compare what is found in it."""
        from paceline_vision.detection.exported import FORMATS, exportable_detector

        if target not in FORMATS:
            raise RecipeError(
                f"{saved.path} holds a detector, which --format {target} cannot express; use --format onnx, "
                "torch-export or safetensors.",
                path=saved.path,
            )
        try:
            dataset = type(self)(self.recipe).dataset
        except PacelineError as error:
            raise DataError(
                f"a detector's export is compared on held-out pictures, which cannot be read: {error} Set "
                "data.path=FOLDER."
            ) from error
        return exportable_detector(saved, self.trained(saved), dataset)

    def _losses(self, model: Model, batch: Batch) -> Tensor:
        """Return the loss of each picture by itself, [N]; random sampling is keyed by the picture's number."""
        losses = []
        devices = [each.device for each in batch.inputs[:1] if each.device.type == "cuda"]
        with torch.random.fork_rng(devices=devices), _with_named_losses(model):
            for image, target, sample in zip(batch.inputs, batch.targets, batch.ids.tolist(), strict=True):
                torch.manual_seed(derive_seed(self.recipe.seed, sample))
                losses.append(_total(model([image], [trainable_boxes(target)])))
        return torch.stack(losses)

    def _unused(self, *, is_generated: bool) -> dict[str, str]:
        unused = all_but(_USED, "data.detection says how pictures with boxes are prepared")
        unused |= dict.fromkeys(_UNUSED_IN_TRAINING, "a detector has its own losses")
        unused["evaluate.top_k"] = "detection has no top-k accuracy"
        unused["model.compile"] = _NOT_COMPILED
        if not self.dataset.is_split_off:
            unused["data.validation_fraction"] = "the data set has its own held-out pictures"
        if self.recipe.data.detection.short_sides is None:
            unused["data.detection.long_side"] = "pictures keep their size (data.detection.short_sides=off)"
        if is_generated:
            unused["data.detection.keep_empty"] = "each picture of data.dataset=shapes has an object"
            return unused
        reason = "it says how data.dataset=shapes is generated"
        return unused | {f"data.detection.generated.{each.name}": reason for each in fields(GeneratedBoxes)}


def trainable_boxes(target: dict[str, Tensor]) -> dict[str, Tensor]:
    """Select the objects of a picture that a network can learn from: no crowds and no empty boxes."""
    boxes = target["boxes"]
    keep = ~target["crowd"] & (boxes[:, 2:] > boxes[:, :2]).all(dim=1)
    return {name: each[keep] for name, each in target.items() if name != "crowd"}


@contextmanager
def _with_named_losses(model: Model) -> Iterator[None]:
    """Make a detector return its losses, with everything else, such as norms, in evaluation mode."""
    root = next(iter(model.modules()))  # type: ignore[attr-defined]  # a network, or a wrapper of one
    parts = [root, *(getattr(root, name) for name in ("rpn", "roi_heads") if hasattr(root, name))]
    modes = [part.training for part in parts]
    for part in parts:
        part.training = True
    try:
        yield
    finally:
        for part, training in zip(parts, modes, strict=True):
            part.training = training


def _detections(model: Model, batch: Batch) -> list[dict[str, Tensor]]:
    """Run detection on each picture by itself, since padding in a batch may change the output."""
    return [model([image])[0] for image in batch.inputs]


def _total(losses: dict[str, Tensor]) -> Tensor:
    return torch.stack([each.float() for each in losses.values()]).sum()
