"""Segmentation: the class of each pixel; mean intersection over union.

This folder holds all that is particular to it: samples (``dataset.py``, ``pipeline.py`` and, by name,
``paceline_vision/sets``), networks (``networks.py``), metrics (``metrics.py``), and what labels pixels with trained
weights (``predictor.py``).
"""

from __future__ import annotations

import os
from dataclasses import fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.checkpoint.weights import SavedWeights
from paceline.data.batch import Batch, Normalize, Placement
from paceline.data.image.datasets import MOST_IMAGES, content_of_files
from paceline.data.image.decode import BrokenImageError
from paceline.data.pipeline import Pipeline, reading_threads
from paceline.data.slices import evenly_spaced
from paceline.errors import ModelError, RecipeError, setting_error
from paceline.host.world import World
from paceline.metrics.accumulator import Collector, Metric
from paceline.models.build import check_accepts
from paceline.plan import DataFacts
from paceline.plugins.dataset_registry import open_registered
from paceline.recipe.data import GeneratedBoxes
from paceline.recipe.schema import Recipe
from paceline.recipe.unused import all_but
from paceline.tasks.task import Model, Task
from paceline_vision.detection.dataset import BoxDataset
from paceline_vision.drawing import device_of, draw_objects
from paceline_vision.segmentation.dataset import IGNORED, IMAGENET_MEAN, MaskDataset, from_objects
from paceline_vision.segmentation.metrics import PixelConfusion, pixel_metrics
from paceline_vision.segmentation.networks import build_segmenter, pixel_logits
from paceline_vision.segmentation.pipeline import MaskPipeline, MaskView

if TYPE_CHECKING:
    from paceline.tasks.exportable import Exportable
    from paceline_vision.segmentation.predictor import SegmentationPredictor

LOSSES = ("cross_entropy", "cross_entropy_dice")

_USED = (
    *("data.dataset", "data.path", "data.workers", "data.prefetch", "data.on_bad", "data.max_broken"),
    *("data.image_size", "data.evaluation_size", "data.interpolation", "data.mean", "data.std"),
    *("data.annotations", "data.mask_values", "data.validation_fraction", "data.detection.generated"),
    *(f"data.augment.{key}" for key in ("crop", "scale", "ratio", "flip", "alternate_flip")),
)
_AUXILIARY = 0.4  # weight of the auxiliary output, as in torchvision's training script
_SMOOTHING = 1.0  # pixels added in the Dice coefficient
_USUAL_SIZE = 256
_FIGURES = 4  # held-out images in the report


class Segmentation(Task):
    """Predicts the class of each pixel.

    An image's loss is the mean over its pixels without ignored ones; a step's loss is the mean over its images. So it
    does not depend on the number of processes and micro-batches.
    """

    headline = "miou"
    unit = "images"
    learns = "pixels"

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self._threads = 0
        self._dice = recipe.train.loss == "cross_entropy_dice"

    @cached_property
    def dataset(self) -> MaskDataset:
        """The images, opened on first use."""
        data = self.recipe.data
        data = replace(data, detection=replace(data.detection, masks=True, keep_empty=True))
        kinds: dict[str, type[MaskDataset | BoxDataset]] = {"masks": MaskDataset, "boxes": BoxDataset}
        opened = open_registered(data.dataset, kinds, data)
        return from_objects(opened) if isinstance(opened, BoxDataset) else opened

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """Height and width of images in training and in evaluation."""
        data = self.recipe.data
        default = data.detection.generated.largest_side if data.dataset == "shapes" else _USUAL_SIZE
        size = default if data.image_size == "auto" else data.image_size
        return size, size if data.evaluation_size == "auto" else data.evaluation_size

    @property
    def scale(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation used to normalise images."""
        data, dataset = self.recipe.data, self.dataset
        mean, std = dataset.mean if data.mean == "auto" else data.mean, dataset.std if data.std == "auto" else data.std
        for key, numbers in (("mean", mean), ("std", std)):
            if len(numbers) != (channels := len(dataset.mean)):
                raise RecipeError(
                    f"data.{key} has {len(numbers)} numbers, but images have {channels} channels: give {channels}."
                )
        return mean, std

    def data_facts(self, world: World) -> DataFacts:
        """Open the images.

        Raises:
            RecipeError: If the recipe uses a feature that the task does not support.
        """
        recipe, dataset = self.recipe, self.dataset
        if recipe.train.loss not in LOSSES:
            raise setting_error(
                "train.loss",
                recipe.train.loss,
                f"is not a loss of task=segmentation; use {' or '.join(LOSSES)}.",
            )
        if recipe.data.augment.crop == "pad":
            raise setting_error(
                "data.augment.crop",
                "pad",
                "is not for task=segmentation; use random_resized, which scales and crops, or none.",
            )
        (size, evaluation_size), (mean, std) = self.sizes, self.scale
        self._threads, reason = reading_threads(recipe.data.workers, world)
        if recipe.data.workers == "auto" and dataset.name == "shapes":
            self._threads, reason = 0, "nothing is read"
        self.metrics = (Metric(name="loss"), *pixel_metrics(dataset.classes))
        content, detail = content_of_files(dataset.files, dataset.digest, limit=2 * MOST_IMAGES)
        return DataFacts(
            train_samples=len(dataset.train),
            evaluation_samples=len(dataset.validation),
            description={
                "dataset": dataset.name,
                "digest": dataset.digest,
                **({} if content is None else {"content_digest": content}),
                "classes": len(dataset.classes),
                "channels": len(dataset.mean),
                "image_size": size,
                "evaluation_size": evaluation_size,
                "mean": list(mean),
                "std": list(std),
                "workers": self._threads,
            },
            reasons={
                "data.workers": reason,
                "data.image_size": "as large as the largest picture drawn"
                if dataset.name == "shapes"
                else "the task's own choice",
                "data.evaluation_size": "as data.image_size",
                **dict.fromkeys(
                    ("data.mean", "data.std"), "ImageNet's" if dataset.mean == IMAGENET_MEAN else "the data's"
                ),
                **({"data.validation": dataset.split} if dataset.split else {}),
                **({"data.content_digest": detail} if detail else {}),
            },
            unused=self._unused(),
            left_out=dataset.left_out,
        )

    def description(self) -> dict[str, Any]:
        """Return facts that prediction needs, marking classes as pixel classes."""
        return {
            "class_names": list(self.dataset.classes),
            "labels_pixels": True,
            "interpolation": self.recipe.data.interpolation,
        }

    def open_pipeline(self, placement: Placement) -> Pipeline:
        """Open the pipeline of images with their label maps."""
        data, (mean, std) = self.recipe.data, self.scale
        views = {
            training: MaskView(
                size=self.sizes[0 if training else 1],
                augment=data.augment if training else None,
                seed=self.recipe.seed,
                mean=mean,
                interpolation=data.interpolation,
            )
            for training in (True, False)
        }
        normalize = Normalize(mean, std, placement)
        return MaskPipeline(
            self.dataset, views, normalize, placement=placement, threads=self._threads, prefetch=data.prefetch
        )

    def build_model(self) -> nn.Module:
        """Build the recipe's network, with one output per class."""
        dataset = self.dataset
        return build_segmenter(self.recipe.model, num_classes=len(dataset.classes), in_channels=len(dataset.mean))

    def check_network(self, network: nn.Module) -> None:
        """Check that the network accepts both image sizes and returns a score per pixel and class."""
        name, classes, channels = self.recipe.model.name, len(self.dataset.classes), len(self.dataset.mean)
        for size in sorted(set(self.sizes)):
            logits = pixel_logits(check_accepts(network, size, channels=channels, name=name))
            if (expected := (1, classes, size, size)) != getattr(logits, "shape", None):
                shape = f"shape {list(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
                raise ModelError(
                    f"model.name={name} returns {shape} for an image of {size} pixels, but it must return logits of "
                    f"shape {list(expected)}: a score for each class and pixel.",
                    key="model.name",
                    value=name,
                )

    def loss(self, model: Model, batch: Batch) -> Tensor:
        """Return the recipe's loss; an auxiliary output has weight 0.4."""
        output, smoothing = model(batch.inputs), self.recipe.train.label_smoothing
        loss = pixel_losses(pixel_logits(output), batch.targets, dice=self._dice, smoothing=smoothing)
        if isinstance(output, dict) and "aux" in output:
            loss = loss + _AUXILIARY * pixel_losses(output["aux"], batch.targets, dice=self._dice, smoothing=smoothing)
        return loss.mean()

    def score(self, model: Model, batch: Batch) -> dict[str, Any]:
        """Return each image's loss without smoothing and auxiliary output, its predictions and its targets."""
        logits = pixel_logits(model(batch.inputs))
        losses = pixel_losses(logits, batch.targets, dice=self._dice)
        return {"loss": losses, "predicted": logits.argmax(dim=1), "target": batch.targets}

    def predict(self, model: Model, batch: Batch) -> dict[str, Tensor]:
        """Return each class's share of each image's pixels, [N, classes], without padding."""
        logits = pixel_logits(model(batch.inputs))
        known = (
            prediction[labels != IGNORED]
            for prediction, labels in zip(logits.argmax(dim=1), batch.targets, strict=True)
        )
        counts = torch.stack([torch.bincount(each, minlength=logits.shape[1]) for each in known])
        return {"shares": counts / counts.sum(dim=1, keepdim=True).clamp(min=1)}

    def shown(self, batch: Batch) -> list[tuple[Tensor, str]]:
        """Return the first three channels under masks, the first class transparent, each with its class names."""
        return self._drawn(batch.inputs.cpu(), batch.targets.cpu())

    def figures(self, model: Model) -> list[tuple[Tensor, str]]:
        """Return a few held-out images under their masks, each followed by the predicted ones."""
        (mean, std), source = self.scale, self.dataset.validation
        view = MaskView(
            size=self.sizes[1], augment=None, seed=0, mean=mean, interpolation=self.recipe.data.interpolation
        )
        normalize, pictures = Normalize(mean, std, Placement(device=device_of(model))), list[tuple[Tensor, str]]()
        for sample in evenly_spaced(len(source), _FIGURES).tolist():
            try:
                pixels, labels = view(*source.read(sample), None)
            except BrokenImageError:  # which the evaluation has reported
                continue
            inputs = normalize(pixels[None])
            predicted = pixel_logits(model(inputs)).argmax(dim=1).cpu()
            predicted[labels[None] == IGNORED] = IGNORED
            name = os.path.basename(source.path(sample))
            for what, targets in (("labelled", labels[None]), ("predicted", predicted)):
                [(picture, classes)] = self._drawn(inputs.cpu(), targets)
                pictures.append((picture, f"{name}, {what}: {classes}"))
        return pictures

    def _drawn(self, inputs: Tensor, targets: Tensor) -> list[tuple[Tensor, str]]:
        mean, std = (torch.tensor(each)[:, None, None] for each in self.scale)
        names, pictures = self.dataset.classes, []
        for image, labels in zip(inputs, targets, strict=True):
            picture = (255 * (image * std + mean)).round().clamp(0, 255).to(torch.uint8)[:3]
            labels_present = [int(each) for each in labels.unique() if each != IGNORED]
            coloured = [each for each in labels_present if each]
            picture = draw_objects(picture, coloured, masks=labels == torch.tensor(coloured)[:, None, None])
            pictures.append((picture, ", ".join(names[each] for each in labels_present)))
        return pictures

    def collectors(self) -> tuple[Collector, ...]:
        """Return the collector of intersection over union and pixel accuracy."""
        return (PixelConfusion(self.dataset.classes, IGNORED),)

    def recall(self, saved: SavedWeights) -> None:
        """Take the classes and channels from the description; no image is read."""
        described = saved.description("data")
        nothing: Any = ()  # no sample is requested
        self.dataset = MaskDataset(
            name=described["dataset"],
            train=nothing,
            validation=nothing,
            classes=tuple(described["class_names"]),
            digest=described["digest"],
            mean=tuple(described["mean"]),
            std=tuple(described["std"]),
        )

    def predictor(self, saved: SavedWeights, device: torch.device) -> SegmentationPredictor:
        """Return what labels the pixels of images."""
        # Imported only where used: training needs none of it.
        from paceline_vision.segmentation.predictor import SegmentationPredictor

        return SegmentationPredictor(saved, self.trained(saved, device), device)

    def exportable(self, saved: SavedWeights, target: str) -> Exportable:
        """Return the network with its inputs: images fitted into a square."""
        from paceline.tasks.exportable import Exportable, Input, normalisation

        data, labels = saved.description("data"), self.predictor(saved, torch.device("cpu"))
        description = (
            f"{'RGB' if labels.channels == 3 else 'all channels'}, float32: resize the longer side to {labels.size} "
            f"pixels ({data['interpolation']}, antialiased) and pad at the right and below; {normalisation(data)}"
        )
        images = Input("images", ("batch", labels.channels, labels.size, labels.size), None, description)
        return Exportable(network=labels.network, inputs=(images,), longest={}, saved=saved)

    def _unused(self) -> dict[str, str]:
        unused = all_but(_USED, "masks follow their images through data.image_size, data.augment.crop and flip alone")
        unused |= dict.fromkeys(("train.loss_options", "train.target_threshold"), "the losses of pixels have none")
        unused["train.class_weights"] = "it weighs images by their class, and here each pixel has one"
        unused["evaluate.top_k"] = "segmentation has no top-k accuracy"
        if not self.dataset.is_split_off:
            unused["data.validation_fraction"] = "the data set has its own held-out images"
        if self.dataset.name != "shapes":
            reason = "it says how data.dataset=shapes is generated"
            unused |= {f"data.detection.generated.{each.name}": reason for each in fields(GeneratedBoxes)}
        return unused


def pixel_losses(logits: Tensor, targets: Tensor, *, dice: bool, smoothing: float = 0.0) -> Tensor:
    """Return each image's loss, [N], in nats: the mean cross-entropy of its pixels without ignored ones.

    With ``dice`` add the mean over the classes present in the image of 1 - (2 |p t| + 1) / (|p| + |t| + 1), where p are
    the probabilities of a class and t is 1 at its pixels (Milletari et al. 2016). An image without valid pixels has
    loss 0.

    Args:
        logits: Logits, [N, classes, H, W].
        targets: Class indices, or ``IGNORED``, [N, H, W].
        dice: Whether to add the Dice loss.
        smoothing: Label smoothing of the cross-entropy.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    targets, is_known = targets.long(), targets != IGNORED
    each = F.cross_entropy(logits, targets, ignore_index=IGNORED, label_smoothing=smoothing, reduction="none")
    losses = each.sum(dim=(1, 2)) / is_known.sum(dim=(1, 2)).clamp(min=1)
    if not dice:
        return losses
    probabilities = logits.softmax(dim=1) * is_known[:, None]
    one_hot = targets[:, None] == torch.arange(logits.shape[1], device=targets.device)[:, None, None]
    sizes, common = one_hot.sum(dim=(2, 3)), (probabilities * one_hot).sum(dim=(2, 3))
    missed = 1 - (2 * common + _SMOOTHING) / (probabilities.sum(dim=(2, 3)) + sizes + _SMOOTHING)
    is_there = sizes > 0
    return losses + (missed * is_there).sum(dim=1) / is_there.sum(dim=1).clamp(min=1)
