"""Image tasks, and image classification: one label per image, top-1 and top-k accuracy, test-time augmentation."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from paceline.checkpoint.hub_folder import UNNAMED
from paceline.checkpoint.weights import SavedWeights
from paceline.data.batch import Backend, Batch, Normalize, Placement, Progress
from paceline.data.class_sampling import SampleClasses
from paceline.data.image.datasets import ImageDataset, content_of, open_dataset
from paceline.data.image.decode import describe_decoder
from paceline.data.image.feed_rates import remembered
from paceline.data.image.pipeline import (
    ImagePipeline,
    OpenedSplit,
    Split,
    choose_backend,
    choose_workers,
    common_size,
    distinct_sizes,
    evaluation_size,
    measure,
    open_backend,
)
from paceline.data.image.selection import digest_of, keep_known_classes, part_of
from paceline.data.image.source import ArraySource, SubsetSource, encoded_source, part_numbers, repeated
from paceline.data.image.transforms import Mixing, View, first_images
from paceline.data.pipeline import Pipeline
from paceline.data.slices import SampleIds, SampleShapes, evenly_spaced, first_samples
from paceline.errors import DataError, RecipeError
from paceline.host.world import World
from paceline.metrics.accumulator import Metric
from paceline.metrics.answers import Answers
from paceline.metrics.named import absent_classes
from paceline.models.build import build_model, check_accepts, takes_usual_size
from paceline.models.speed_net import WHITENING_IMAGES, whitening_layers
from paceline.parsing.plain_text import one_form
from paceline.plan import DataFacts, Plan
from paceline.plugins.references import is_ours, is_reference
from paceline.recipe.data import Data, Progressive
from paceline.recipe.schema import Recipe
from paceline.tasks.class_losses import ClassificationLoss, rank_of_target
from paceline.tasks.task import BatchMaker, Model, Task
from paceline.tasks.views import CROPS, AveragedViews, scale_for_crops

_CLASS_LOSSES, _NUMBER_LOSSES = ("cross_entropy", "focal"), ("mse", "l1", "huber")
_LOSSES = {
    "class": "cross_entropy or another loss of classes",
    "labels": "bce, asl or your own",
    "numbers": ", ".join(_NUMBER_LOSSES),
}


class ImageTask(Task):
    """Base class of image tasks; a subclass defines their targets.

    Attributes:
        unused: Dotted keys that have no effect on the task, with the reason.
    """

    unit = "images"
    takes_sizes = True
    can_shorten = True
    unused: Mapping[str, str] = MappingProxyType({})

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self._backend = ""
        self._workers = 0

    @cached_property
    def dataset(self) -> ImageDataset:
        """The images and their classes, opened on first use."""
        return open_dataset(self.recipe.data)

    @cached_property
    def _shapes(self) -> SampleShapes | None:
        """Shape of each held-out image as shown; None if all are square."""
        data, dataset = self.recipe.data, self.dataset
        if not self._may_be_rectangles or len(dataset.validation) == 0:
            return None
        size = evaluation_size(data, dataset)
        shapes = measure(dataset.validation, size=size, multiple=data.evaluation_multiple)
        return None if (shapes == size).all() else shapes

    @property
    def _training_sides(self) -> set[int]:
        """Height and width of the training images, in each epoch."""
        progressive, size = self.recipe.data.progressive, self.dataset.image_size
        return {size} | {progressive.size_at(epoch, size) for epoch in range(progressive.end)}

    @property
    def _may_be_rectangles(self) -> bool:
        return self.recipe.data.evaluation_shape != "square" and self.recipe.data.dataset != "synthetic"

    def data_facts(self, world: World) -> DataFacts:
        """Open the dataset and resolve its `auto` settings.

        Raises:
            RecipeError: If the recipe's targets or loss belong to another task.
        """
        self._check_targets()
        data, dataset = self.recipe.data, self.dataset
        # Refuses an augmentation that does not work at this image size.
        View(image_size=dataset.image_size, channels=dataset.channels, augment=data.augment)
        start = data.progressive.start_size
        if start is not None and start >= dataset.image_size:
            raise RecipeError(
                f"data.progressive.start_size={start}, but images grow from it to data.image_size={dataset.image_size}"
                "; give a smaller one, or off."
            )
        self._backend, backend_reason = choose_backend(self._shown(), dataset, world.local_world_size)
        self._workers, workers_reason = choose_workers(data, self._backend, world, remembered(self.recipe, world))
        reasons = {f"data.{key}": reason for key, reason in dataset.reasons.items()}
        reasons |= {"data.backend": backend_reason, "data.workers": workers_reason}
        if encoded_source(dataset.train) is None:
            reasons["data.augment.shrink_on_load"] = "this data set has no files that are decoded"
        else:
            reasons["data.decoder"] = f"for JPEG files: {describe_decoder()}"
        reasons["data.evaluation_size"] = "as data.image_size"
        if self._may_be_rectangles and self._shapes is None:
            reasons["data.evaluation_shape"] = (
                "every held-out image becomes a square" if len(dataset.validation) else "no images are held out"
            )
        shapes = {} if self._shapes is None else distinct_sizes(self._shapes)
        content, content_told, copies = content_of(dataset)
        reasons |= {"data.content_digest": content_told} if content_told else {}
        reasons |= {"data.copies": copies} if copies else {}
        targets = self.target_facts(reasons)
        return DataFacts(
            train_samples=len(dataset.train) * self.recipe.data.augment.repeats,
            evaluation_samples=len(dataset.validation),
            description={
                "dataset": dataset.name,
                "digest": dataset.digest,
                **({} if content is None else {"content_digest": content}),
                **targets,
                "image_size": dataset.image_size,
                **_sizes_by_epoch(data.progressive, dataset.image_size),
                "evaluation_size": evaluation_size(data, dataset),
                **({"evaluation_shapes": {f"{h}x{w}": count for (h, w), count in shapes.items()}} if shapes else {}),
                **dataset.selection,
                **({} if dataset.holdout is None else {"holdout_samples": len(dataset.holdout)}),
                "channels": dataset.channels,
                "backend": self._backend,
                "workers": self._workers,
                "mean": list(dataset.mean),
                "std": list(dataset.std),
            },
            reasons=reasons,
            unused=dict(self.unused),
            left_out=(
                *dataset.left_out,
                *absent_classes(self.recipe.evaluate.metrics, dataset.validation.labels, dataset.classes),
            ),
        )

    @abstractmethod
    def target_facts(self, reasons: dict[str, str]) -> dict[str, Any]:
        """Return the plan's facts about the targets; appends explanations to ``reasons``."""

    def sample_sets(self) -> SampleClasses | None:
        """Return the mixture part that each image belongs to, with repeats."""
        numbers = part_numbers(self.dataset.train)
        return None if numbers is None else np.tile(numbers, self.recipe.data.augment.repeats)

    def description(self) -> dict[str, Any]:
        """Return facts that prediction needs."""
        native = self.dataset.native_size or common_size(self.dataset.validation)
        return {
            "evaluation_crop": self.recipe.data.evaluation_crop,
            "interpolation": self.recipe.data.interpolation,
            # Images that already have the target size are not cropped.
            **({} if native is None else {"native_size": list(native)}),
            # Also if the held-out images are square: images to predict need not be.
            **({"evaluation_multiple": self.recipe.data.evaluation_multiple} if self._may_be_rectangles else {}),
        }

    def open_pipeline(self, placement: Placement) -> Pipeline:
        """Open batches of the dataset through the chosen back-end."""
        dataset = self.dataset
        return ImagePipeline(
            train=OpenedSplit(
                source=repeated(dataset.train, self.recipe.data.augment.repeats),
                open=partial(self._open, "train", placement),
            ),
            evaluation=OpenedSplit(
                source=dataset.validation, open=partial(self._open, "validation", placement), shapes=self._shapes
            ),
            normalize=Normalize(dataset.mean, dataset.std, placement),
            placement=placement,
            has_workers=self._workers > 0,
            mixing=Mixing(
                self.recipe.data.mix,
                len(dataset.classes),
                self.recipe.seed,
                repeats=self.recipe.data.augment.repeats,
            ),
        )

    def build_model(self) -> nn.Module:
        """Build the recipe's network, sized for the classes and the images' channels."""
        dataset = self.dataset
        return build_model(self.recipe.model, num_classes=len(dataset.classes), in_channels=dataset.channels)

    def first_weights(self, network: nn.Module) -> None:
        """Initialise whitening layers from training images, without augmentation."""
        layers = whitening_layers(network)
        if not layers:
            return
        dataset, data = self.dataset, self.recipe.data
        view = View(
            image_size=dataset.image_size,
            channels=dataset.channels,
            evaluation_crop=data.evaluation_crop,
            interpolation=data.interpolation,
        )
        images = first_images(dataset.train, view, WHITENING_IMAGES)
        normalised = Normalize(dataset.mean, dataset.std, Placement(device=torch.device("cpu")))(images)
        for layer in layers:
            layer.begin_from(normalised)

    def begins_from_data(self, network: nn.Module) -> bool:
        """Whether the network has whitening layers, or a subclass overrides the initial weights."""
        is_own = type(self).first_weights is not ImageTask.first_weights
        return is_own or bool(whitening_layers(network))

    def check_network(self, network: nn.Module) -> None:
        """Check the network with each image size of training and evaluation."""
        dataset, data = self.dataset, self.recipe.data
        sides = self._training_sides | {evaluation_size(data, dataset)}
        # Custom code may call the network in another way, and a network on the meta device has no values.
        methods = (getattr(type(self), name) for name in ("loss", "open_pipeline", "build_model", "first_weights"))
        is_custom = is_reference(self.recipe.model.name) or any(not is_ours(each.__module__) for each in methods)
        is_empty = any(each.is_meta for each in network.parameters())
        if is_custom or is_empty or takes_usual_size(network, dataset.image_size):
            sides -= {dataset.image_size}
        rectangles = () if self._shapes is None else distinct_sizes(self._shapes)
        for shape in sorted({*((side, side) for side in sides), *rectangles}):
            check_accepts(network, shape, channels=dataset.channels, name=self.recipe.model.name)

    @property
    def has_known_shapes(self) -> bool:
        """Whether batches are the data set's images, and not those of your own pipeline."""
        return type(self).open_pipeline is ImageTask.open_pipeline

    def empty_batches(self, plan: Plan, placement: Placement, *, training: bool) -> BatchMaker:
        """Return batches of images, the largest of training or evaluation, without mixing in the latter."""
        data, dataset = self.recipe.data, self.dataset
        memory_format = torch.channels_last if placement.channels_last else torch.contiguous_format
        if training:
            shape = (dataset.image_size, dataset.image_size)
            is_mixed = Mixing(data.mix, len(dataset.classes), self.recipe.seed).is_active
        else:
            views, side, is_mixed = self.recipe.evaluate.augment, evaluation_size(data, dataset), False
            if views in CROPS:
                side = evaluation_size(scale_for_crops(data, side, views), dataset)
            shapes = [_height_and_width(each) for each in plan.data.get("evaluation_shapes", ())] or [(side, side)]
            shape = max(shapes, key=math.prod)
        labels = dataset.train.labels

        def make(count: int) -> Batch:
            inputs = torch.empty((count, dataset.channels, *shape), memory_format=memory_format)
            targets = torch.empty(count, dtype=torch.int64)
            if labels.ndim > 1 or is_mixed:
                dtype = torch.float32 if is_mixed else torch.from_numpy(labels[:0]).dtype
                targets = torch.empty(count, len(dataset.classes), dtype=dtype)
            part = first_samples(count)
            return Batch(inputs, targets, part.ids, part)

        return make

    def shorten(self, samples: int, evaluation_samples: int) -> None:
        """Reduce the images to a few."""
        dataset = self.dataset
        train, validation = (
            SubsetSource(source, evenly_spaced(len(source), count))
            for source, count in ((dataset.train, samples), (dataset.validation, evaluation_samples))
        )
        self.dataset = replace(dataset, train=train, validation=validation)

    def data_digest(self, world: World) -> str | None:
        """Return the digest of the images, which need not suit the recipe for that."""
        return self.dataset.digest

    def adapt_to(self, saved: SavedWeights) -> None:
        """Number the classes as the weights do, if all of the data's are known to them."""
        described = saved.description("data")
        names = () if described.get(UNNAMED) else tuple(described.get("class_names") or ())
        if self.learns == "numbers" or not names or self.dataset.classes == names:
            return
        if set(one_form(self.dataset.classes, names).values()) <= set(names):
            self.dataset = keep_known_classes(self.dataset, names)

    def check_trained(self, saved: SavedWeights) -> None:
        """Refuse images of the right size, which are used unchanged here, for weights whose images timm resizes."""
        data, size = self.recipe.data, evaluation_size(self.recipe.data, self.dataset)
        is_resized = saved.metadata.get("shown_by") == "timm" and data.evaluation_crop < 1
        if is_resized and common_size(self.dataset.validation) == (size, size):
            raise DataError(
                f"the images are {size}x{size} already and would not be resized, but {saved.path.parent} was made for "
                f"images that are resized to {round(size / data.evaluation_crop)} and cropped; confirm with "
                "data.evaluation_crop=1, or give the images in their original size."
            )

    def split_sizes(self) -> tuple[int, int]:
        """Return the images of training and of validation."""
        return len(self.dataset.train), len(self.dataset.validation)

    def score_only(self, ids: SampleIds, *, training: bool) -> None:
        """Score some training or validation images, without augmentation."""
        source = self.dataset.train if training else self.dataset.validation
        self.dataset = replace(self.dataset, validation=SubsetSource(source, ids))

    def train_only(self, ids: SampleIds) -> None:
        """Train on some of the training images."""
        dataset = self.dataset
        digest = digest_of(dataset.digest, "train only", ids)
        self.dataset = replace(dataset, train=part_of(dataset.train, ids), digest=digest)

    def score_holdout(self, trained: str) -> None:
        """Score the images that `data.holdout_fraction` held out of training."""
        if self.dataset.holdout is None:
            raise RecipeError(
                f"{trained} held no training images out (data.holdout_fraction=0), and a choice made on training "
                "images is biased; train with data.holdout_fraction=0.05, for example, or choose on the validation "
                "images with --on validation, which biases their accuracy."
            )
        self.dataset = replace(self.dataset, validation=self.dataset.holdout)

    def recall(self, saved: SavedWeights) -> None:
        """Take the classes, channels and size of images from the description; no image is read."""
        described = saved.description("data")
        # The size that the network was built for; inputs may have another.
        size, channels = described["image_size"], described["channels"]
        none = ArraySource(np.empty((0, size, size, channels), dtype=np.uint8), np.empty(0, dtype=np.int64), "none")
        names = described.get("targets") or described.get("class_names") or range(described.get("classes", 0))
        self.dataset = ImageDataset(
            name=described["dataset"],
            train=none,
            validation=none,
            classes=tuple(map(str, names)),
            channels=channels,
            image_size=size,
            digest=described["digest"],
            mean=tuple(described["mean"]),
            std=tuple(described["std"]),
        )

    def pictures(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the images before normalisation."""
        scales = zip(self.dataset.mean, self.dataset.std, strict=True)
        # Channel by channel, since Python numbers reach a device without a blocking copy.
        channels = [inputs[:, channel] * (255 * std) + 255 * mean for channel, (mean, std) in enumerate(scales)]
        return torch.stack(channels, dim=1).round_().clamp_(0, 255).to(torch.uint8)

    def _check_targets(self) -> None:
        loss, data = self.recipe.train.loss, self.recipe.data
        is_of_others = (loss in _NUMBER_LOSSES) != (self.learns == "numbers") or loss == "cross_entropy_dice"
        if is_of_others or (self.learns == "labels" and loss in _CLASS_LOSSES):
            raise RecipeError(
                f"train.loss={loss} is not a loss of task={self.recipe.task}; use {_LOSSES[self.learns]}."
            )
        if data.target_columns and self.learns == "class":
            raise RecipeError(
                f"data.target_columns has no effect with task={self.recipe.task}; use task=image_regression or "
                "image_multilabel."
            )

    def _shown(self) -> Data:
        """Return the preprocessing of scored images: the parts of the recipe's section that affect them."""
        data, augment = self.recipe.data, self.recipe.evaluate.augment
        if augment in CROPS:
            data = scale_for_crops(data, evaluation_size(data, self.dataset), augment)
        is_square = self._may_be_rectangles and self._shapes is None
        return replace(data, evaluation_shape="square") if is_square else data

    def _open(self, split: Split, placement: Placement, progress: Progress | None) -> Backend:
        return open_backend(
            self._backend,
            self.recipe.data if split == "train" else self._shown(),
            self.dataset,
            split,
            seed=self.recipe.seed,
            workers=self._workers,
            placement=placement,
            progress=progress,
        )


class ClassTask(ImageTask):
    """Trains on image classes with one of the recipe's losses."""

    @cached_property
    def _loss(self) -> ClassificationLoss:
        return ClassificationLoss(self.recipe.train, self.weights_by_class("train.class_weights"))

    def description(self) -> dict[str, Any]:
        """Return class names and other facts that prediction needs."""
        return {"class_names": list(self.dataset.classes), **super().description()}

    def prepare_training(self, placement: Placement) -> None:
        """Build the recipe's loss and test it.

        Raises:
            RecipeError: If it cannot be imported or built, or does not return one loss per sample.
        """
        self._loss.check(len(self.dataset.classes), placement.device)

    def loss(self, model: Model, batch: Batch) -> torch.Tensor:
        """Return the recipe's loss."""
        return self._loss(model(batch.inputs), batch.targets, batch.slice.mean_class_weight)

    def shown(self, batch: Batch) -> list[tuple[torch.Tensor, str]]:
        """Return the images, each with its class, its classes, or its mixture shares."""
        names, captions = self.dataset.classes, []
        for picture, target in zip(self.pictures(batch.inputs), batch.targets.cpu(), strict=True):
            shares = {int(target): 1.0} if not target.ndim else dict(enumerate(target.tolist()))
            parts = [(share, names[at]) for at, share in shares.items() if share >= 0.005]
            caption = ", ".join(name if share >= 0.995 else f"{name} {share:.0%}" for share, name in parts)
            captions.append((picture, caption))
        return captions


class ImageClassification(ClassTask):
    """Assigns one of several classes to an image.

    Subclass it and override :meth:`build_model` for a custom network, :meth:`loss` for another loss, or ``metrics`` and
    :meth:`score` for more metrics.
    """

    headline = "top1_accuracy"
    gives_scores = True
    metrics: tuple[Metric, ...] = (
        Metric(name="loss"),
        Metric(name="top1_accuracy", scale=100.0, higher_is_better=True),
    )
    _top_k: Metric | None = None

    def labelled_images(self) -> ImageDataset:
        """Return the data set."""
        return self.dataset

    def sample_classes(self) -> SampleClasses:
        """Return the images' labels, with repeats."""
        return np.tile(self.dataset.train.labels, self.recipe.data.augment.repeats)

    def target_facts(self, reasons: dict[str, str]) -> dict[str, Any]:
        """Return the number of classes, and choose the metrics."""
        dataset, top_k = self.dataset, self.recipe.evaluate.top_k
        # For example, years taken for class numbers.
        empty = len(dataset.classes) - len(np.unique(dataset.train.labels))
        if empty:
            notice = f"{empty:,} of {len(dataset.classes):,} classes have no image to train on"
            reasons["data.classes"] = "; ".join([notice, *filter(None, [reasons.get("data.classes")])])
        if top_k < len(dataset.classes):
            self._top_k = Metric(name=f"top{top_k}_accuracy", scale=100.0, higher_is_better=True)
            self.metrics = (*(m for m in self.metrics if m.name != self._top_k.name), self._top_k)
        else:
            reasons["evaluate.top_k"] = (
                f"left out: any prediction is among the top {top_k} of {len(dataset.classes)} classes"
            )
        return {"classes": len(dataset.classes), **({"classes_without_images": empty} if empty else {})}

    def evaluated(self, model: Model) -> Model:
        """Return the network, or a wrapper that averages several views of each image."""
        kind = self.recipe.evaluate.augment
        return model if kind == "none" else AveragedViews(model, kind, evaluation_size(self.recipe.data, self.dataset))

    def score(self, model: Model, batch: Batch) -> dict[str, torch.Tensor]:
        """Return the loss without smoothing, and whether the label is the top or among the top k predictions."""
        logits = model(batch.inputs).float()
        rank = rank_of_target(logits, batch.targets)
        values = {
            "loss": F.cross_entropy(logits, batch.targets, reduction="none"),
            "top1_accuracy": rank < 1,
        }
        if self._top_k is not None:
            values[self._top_k.name] = rank < self.recipe.evaluate.top_k
        return values | ({"logit": logits, "label": batch.targets} if self.recipe.evaluate.metrics else {})

    def predict(self, model: Model, batch: Batch) -> dict[str, torch.Tensor]:
        """Return the most probable class and its probability."""
        probability, label = model(batch.inputs).float().softmax(dim=1).max(dim=1)
        return {"prediction": label, "probability": probability, "target": batch.targets}

    def answers(self, model: Model, batch: Batch) -> Answers | None:
        """Return the class with the highest score; None if labels are mixtures."""
        return None if batch.targets.is_floating_point() else Answers.of(model(batch.inputs), batch.targets)


def _height_and_width(shape: str) -> tuple[int, int]:
    height, width = map(int, shape.split("x"))
    return height, width


def _sizes_by_epoch(progressive: Progressive, image_size: int) -> dict[str, dict[str, int]]:
    """Return training image sizes by first epoch (from 0), for the plan; empty if the size is constant."""
    if progressive.start_size is None:
        return {}
    sizes = [progressive.size_at(epoch, image_size) for epoch in range(progressive.end + 1)]
    changes = [epoch for epoch, size in enumerate(sizes) if epoch == 0 or size != sizes[epoch - 1]]
    return {"image_size_from_epoch": {str(epoch): sizes[epoch] for epoch in changes}}
