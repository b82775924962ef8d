"""Image tasks, and image classification: one label per image, top-1 and top-k accuracy, test-time augmentation."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.data.batch import Backend, Batch, Progress
from paceline.data.class_balance import SampleClasses
from paceline.data.image.datasets import ImageDataset, content_of, open_dataset
from paceline.data.image.decode import describe_decoder
from paceline.data.image.feeding import remembered
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
from paceline.data.image.source import encoded_source, part_numbers, repeated
from paceline.data.image.transforms import Mixing, View, first_images
from paceline.data.pipeline import Normalize, Pipeline, Placement
from paceline.data.slices import SampleShapes
from paceline.errors import PacelineError, RecipeError
from paceline.metrics.accumulator import Metric
from paceline.metrics.answers import Answers
from paceline.metrics.named import absent_classes
from paceline.models.build import build_model, check_accepts, takes_usual_size
from paceline.models.speed_net import WHITENING_IMAGES, whitening_layers
from paceline.plan import DataFacts
from paceline.recipe.data import Data, Progressive
from paceline.recipe.schema import Recipe
from paceline.recipe.training import Train
from paceline.references import call_reference, is_ours, is_reference
from paceline.registry import load
from paceline.tasks.task import Model, Task
from paceline.world import World

_CLASS_LOSSES, _NUMBER_LOSSES = ("cross_entropy", "focal"), ("mse", "l1", "huber")
Learned = Literal["class", "labels", "numbers"]
_LOSSES: dict[Learned, str] = {
    "class": "cross_entropy or another loss of classes",
    "labels": "bce, asl or your own",
    "numbers": ", ".join(_NUMBER_LOSSES),
}


class ImageTask(Task):
    """Base class of image tasks; a subclass defines their targets.

    Attributes:
        learns: The targets of an image: one class, any number of labels, or numbers.
        unused: Dotted keys that have no effect on the task, with the reason.
    """

    unit = "images"
    learns: Learned = "class"
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


def _sizes_by_epoch(progressive: Progressive, image_size: int) -> dict[str, dict[str, int]]:
    """Return training image sizes by first epoch (from 0), for the plan; empty if the size is constant."""
    if progressive.start_size is None:
        return {}
    sizes = [progressive.size_at(epoch, image_size) for epoch in range(progressive.end + 1)]
    changes = [epoch for epoch, size in enumerate(sizes) if epoch == 0 or size != sizes[epoch - 1]]
    return {"image_size_from_epoch": {str(epoch): sizes[epoch] for epoch in changes}}


def rank_of_target(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return how many classes rank before the target, [N]: higher scores, and equal scores with a lower index.

    So ties are not all counted as correct, and NaN scores count against the target.
    """
    target_logit = logits.gather(1, targets[:, None])
    earlier = torch.arange(logits.shape[1], device=logits.device) < targets[:, None]
    return (~(logits <= target_logit) | ((logits == target_logit) & earlier)).sum(dim=1)


class ClassificationLoss:
    """The recipe's training loss, a mean over samples, in nats.

    With class weights it is a micro-batch's contribution to the step's weighted mean: the sum of w_i * l_i, divided by
    the micro-batch's samples and by the step's mean weight. w_i is the weight of the sample's class, for a mixed sample
    the mean over its classes by their shares. ``torch.nn.CrossEntropyLoss`` weighs smoothed targets instead: with
    unequal weights, the rarest class is then the best answer for every sample.

    * cross_entropy, with label smoothing (Szegedy et al. 2015)
    * bce: binary cross-entropy per class, averaged over classes (Wightman et al. 2021); targets are smoothed in the
      same way, and with ``target_threshold`` become 1 above it, else 0
    * focal, and losses of other packages or the user: called with the same targets as probabilities [N, classes], they
      return l_i

    Raises:
        RecipeError: If the recipe's loss cannot be imported or built with ``train.loss_options``.
    """

    def __init__(self, train: Train, class_weights: Sequence[float] = ()) -> None:
        self._weights = torch.tensor(class_weights, dtype=torch.float64) if class_weights else None
        self._name = train.loss
        self._of_samples: Callable[[Tensor, Tensor], Tensor] | None = None
        if train.loss not in ("cross_entropy", "bce"):
            make = load("losses", train.loss, RecipeError)
            try:
                self._of_samples = make(**train.loss_options)
            except (TypeError, ValueError) as error:
                raise RecipeError(
                    f"train.loss_options {train.loss_options} do not fit train.loss={train.loss}: {error}. Name a "
                    "factory that takes them and returns a function of (logits, targets)."
                ) from error
        self._smoothing = train.label_smoothing
        self._threshold = train.target_threshold

    def __call__(self, logits: Tensor, targets: Tensor, mean_class_weight: float | None = None) -> Tensor:
        """Return the loss of logits [N, classes] on classes, int64 [N], or probabilities [N, classes].

        Args:
            logits: Logits.
            targets: Target classes or probabilities.
            mean_class_weight: Mean weight of the step's samples; None outside a training step.
        """
        if self._weights is not None or self._of_samples is not None:
            return self.mean(self._losses(logits, targets), targets, mean_class_weight)
        if self._name == "cross_entropy":
            return F.cross_entropy(logits, targets, label_smoothing=self._smoothing)
        return F.binary_cross_entropy_with_logits(logits.float(), self._distribution(targets, logits.shape[1]))

    def check(self, classes: int, device: torch.device) -> None:
        """Test an external loss on two samples.

        Raises:
            RecipeError: If it does not return one loss per sample, with a gradient.
        """
        if self._of_samples is None:
            return
        if isinstance(self._of_samples, nn.Module):
            if any(each.requires_grad for each in self._of_samples.parameters()):
                raise RecipeError(
                    f"train.loss={self._name} has parameters, which no optimizer updates; put them in the network."
                )
            self._of_samples.to(device)
        samples = 2 + (classes == 2)  # differs from the number of classes, so that a loss per class has another shape
        logits = torch.zeros(samples, classes, device=device, requires_grad=True)
        try:
            with torch.enable_grad():
                tried = self._each(logits, self._distribution(torch.zeros_like(logits[:, 0]).long(), classes))
        except PacelineError:
            raise
        except Exception as error:  # an external loss may raise anything
            raise RecipeError(
                f"train.loss={self._name} does not take logits and probabilities of shape [{samples}, {classes}] "
                f"({type(error).__name__}: {' '.join(str(error).split())[:200]}); correct it."
            ) from error
        if not tried.requires_grad:
            raise RecipeError(f"train.loss={self._name} gave losses without a gradient; compute them with torch.")

    def mean(self, losses: Tensor, targets: Tensor, mean_class_weight: float | None = None) -> Tensor:
        """Return the mean of losses [N], of this or another kind, weighted by the samples' classes."""
        if self._weights is not None:
            weights = self._weights = self._weights.to(losses)
            losses = losses * (targets.to(weights) @ weights if targets.is_floating_point() else weights[targets])
        return losses.sum() / (len(losses) * (mean_class_weight or 1.0))

    def _losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return l_i, [N]."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        targets = targets.to(logits.dtype) if targets.is_floating_point() else targets
        if self._name == "cross_entropy":
            return F.cross_entropy(logits, targets, label_smoothing=self._smoothing, reduction="none")
        distribution = self._distribution(targets, logits.shape[1], logits.dtype)
        if self._name == "bce":
            return F.binary_cross_entropy_with_logits(logits, distribution, reduction="none").mean(dim=1)
        return self._each(logits, distribution)

    def _each(self, logits: Tensor, distribution: Tensor) -> Tensor:
        """Return the loss of each sample, [N], from a loss that is not torch's.

        Raises:
            RecipeError: If it returns anything else.
        """
        losses: Tensor = call_reference("train.loss", self._name, self._of_samples, RecipeError, logits, distribution)
        if isinstance(losses, Tensor) and losses.shape == logits.shape[:1]:
            return losses
        problem = f"shape {list(losses.shape)}" if isinstance(losses, Tensor) else f"type {type(losses).__name__}"
        raise RecipeError(
            f"train.loss={self._name} gave a result of {problem} for {len(logits)} samples, but a loss is a tensor of "
            "one number for each sample (torch's: train.loss_options={reduction: none}); leave out the mean."
        )

    def _distribution(self, targets: Tensor, classes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the binary targets, [N, classes]."""
        distribution = targets if targets.is_floating_point() else F.one_hot(targets, classes).to(dtype)
        if self._smoothing:
            distribution = distribution * (1 - self._smoothing) + self._smoothing / classes
        if self._threshold is not None:
            distribution = (distribution > self._threshold).to(distribution.dtype)
        return distribution.to(dtype)


class FocalLoss:
    """The focal loss (Lin et al. 2017) of a softmax: the sum over classes of t * (1 - p) ** gamma * -log p.

    With gamma 0 it is the cross-entropy, also for mixed and smoothed targets t.

    Args:
        gamma: Focusing parameter: how strongly probable classes are down-weighted.
    """

    def __init__(self, gamma: float = 2.0) -> None:
        if isinstance(gamma, bool) or not isinstance(gamma, int | float) or not 0 <= gamma < math.inf:
            raise ValueError(f"found gamma={gamma}, but it must be a number of 0 or more")
        self._gamma = gamma

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each sample, [N], in nats, from logits and targets [N, classes]."""
        logs = logits.log_softmax(dim=1)
        # Above 0: a power below 1 has no finite derivative at 0.
        complement = (-logs.expm1()).clamp(min=torch.finfo(logs.dtype).tiny)
        return -(targets * complement**self._gamma * logs).sum(dim=1)


CROPS = ("five_crop", "ten_crop")


class AveragedViews:
    """A network's mean prediction over several views of each image: test-time augmentation.

    Probabilities are averaged, as Krizhevsky et al. (2012) do over ten crops and Simonyan and Zisserman (2014) over an
    image and its mirror; Jordan (arXiv:2404.00498, 2024) adds both shifted by a pixel in either direction. Returns the
    logarithm of the mean, which is scored like any logits and whose cross-entropy is that of the mean.

    Args:
        model: The network: images [N, C, H, W] to logits [N, classes].
        kind: ``flip``, ``flip_shift``, ``five_crop`` or ``ten_crop``.
        side: Height and width of a crop in pixels.
    """

    def __init__(self, model: Model, kind: str, side: int) -> None:
        self._model = model
        self._kind = kind
        self._side = side

    def __call__(self, images: Tensor) -> Tensor:
        """Return the logarithm of the mean probabilities, float32 [N, classes]."""
        # Keep the memory format: another one would recompile a compiled network.
        is_last = images.is_contiguous(memory_format=torch.channels_last)
        memory_format = torch.channels_last if is_last else torch.contiguous_format
        views = (view.contiguous(memory_format=memory_format) for view in self._views(images))
        logs = [self._model(view).float().log_softmax(dim=1) for view in views]
        if self._kind == "flip_shift":
            # The image and its mirror together weigh as much as the four shifted views.
            logs[:2] = [each + math.log(2) for each in logs[:2]]
        return torch.stack(logs).logsumexp(dim=0) - math.log(8 if self._kind == "flip_shift" else len(logs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _views(self, images: Tensor) -> tuple[Tensor, ...]:
        if self._kind in CROPS:
            from torchvision.transforms.v2 import functional

            views: tuple[Tensor, ...] = getattr(functional, self._kind)(images, [self._side, self._side])
            return views
        shown = [images]
        if self._kind == "flip_shift":
            # Shifted by a pixel to the lower right and the upper left, with reflection padding.
            height, width = images.shape[-2:]
            padded = F.pad(images, (1, 1, 1, 1), mode="reflect")
            shown += (padded[:, :, offset : offset + height, offset : offset + width] for offset in (0, 2))
        return tuple(view for each in shown for view in (each, each.flip(3)))


def scale_for_crops(data: Data, side: int, kind: str) -> Data:
    """Return the preprocessing from which crops of ``side`` pixels can be cut at the corners and the centre.

    As Krizhevsky et al.: the central square of the image, before cropping.

    Raises:
        RecipeError: If no border is left around the centre crop, or images are not square.
    """
    whole = round(side / data.evaluation_crop)
    if data.evaluation_shape != "square":
        raise RecipeError(
            f"evaluate.augment={kind} cuts its crops from a square, and data.evaluation_shape={data.evaluation_shape}; "
            "use one of the two, or evaluate.augment=flip."
        )
    if whole == side:
        raise RecipeError(
            f"evaluate.augment={kind} has no effect: with data.evaluation_crop={data.evaluation_crop} all crops of "
            f"{side} pixels are the centre; give a smaller evaluation_crop, for example 0.875."
        )
    return replace(data, evaluation_size=whole, evaluation_crop=1.0)
