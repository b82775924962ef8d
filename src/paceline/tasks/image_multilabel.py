"""Multi-label image classification: any number of classes per image, including none, each a binary decision."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.data.batch import Batch
from paceline.data.image.datasets import ImageDataset, open_dataset
from paceline.data.image.selection import relabelled
from paceline.errors import DataError, RecipeError
from paceline.metrics.accumulator import Collector, Metric
from paceline.metrics.multilabel import MULTILABEL_METRICS, LabelScores
from paceline.recipe.schema import Recipe
from paceline.recipe.training import TrainSection
from paceline.tasks.class_losses import ClassificationLoss
from paceline.tasks.image_classification import ClassTask
from paceline.tasks.labelling import label_probabilities, thresholds_of
from paceline.tasks.task import Model

_SEVERAL = "image_multilabel assigns any number of labels"
_USUAL = 0.5  # the recipe's default threshold
_OF_ONE = ("train.label_smoothing", "train.class_weights", "data.sampling", "evaluate.top_k")


class ImageMultilabel(ClassTask):
    """Predicts each class whose probability (sigmoid) exceeds the class's threshold.

    Subclass it like :class:`~paceline.tasks.image_classification.ImageClassification`; the default ``train.loss`` of a
    subclass is ``bce`` too.
    """

    headline = "map"
    metrics = (Metric(name="loss"), *MULTILABEL_METRICS)
    learns = "labels"
    gives_scores = True
    unused = MappingProxyType(dict.fromkeys(_OF_ONE, _SEVERAL))

    def __init__(self, recipe: Recipe) -> None:
        # A recipe that names a subclass is parsed without loading it, so its loss then has the general default.
        if recipe.task != "image_multilabel" and recipe.train.loss == TrainSection.loss:
            recipe = replace(recipe, train=replace(recipe.train, loss="bce"))
        super().__init__(recipe)

    @cached_property
    def dataset(self) -> ImageDataset:
        """The images with their labels, 0 or 1, float32 [N, classes].

        Raises:
            DataError: If a label has another value.
            RecipeError: If each image has exactly one class.
        """
        dataset, data = open_dataset(self.recipe.data, several_labels=True), self.recipe.data
        if dataset.train.labels.ndim == 1:
            raise RecipeError(
                f"task=image_multilabel learns any number of labels of an image, and data.dataset={data.dataset} has "
                "one for each: use a csv or parquet table."
            )
        for labels in (dataset.train.labels, dataset.validation.labels):
            if invalid := labels[~np.isin(labels, (0, 1))][:1].tolist():
                raise DataError(
                    f"data.dataset={data.dataset} has the label {invalid[0]}, but a label is 0 or 1: correct it."
                )
        return relabelled(dataset, lambda labels: labels.astype(np.float32))

    @cached_property
    def _loss(self) -> ClassificationLoss:
        return ClassificationLoss(replace(self.recipe.train, label_smoothing=0.0))

    @cached_property
    def thresholds(self) -> tuple[float, ...]:
        """Return the probability threshold of each class.

        Raises:
            RecipeError: If the recipe names an unknown class.
        """
        defaults = dict.fromkeys(self.dataset.classes, _USUAL)
        return thresholds_of(self.recipe.evaluate.thresholds, defaults, key="evaluate.thresholds")

    def target_facts(self, reasons: dict[str, str]) -> dict[str, Any]:
        """Return the number of classes and the threshold of each."""
        dataset, mix = self.dataset, self.recipe.data.mix
        if mix.cutmix > 0:
            raise RecipeError(
                f"data.mix.cutmix={mix.cutmix:g} may cut out what a label names: use data.mix.mixup, which mixes "
                "the labels too, or leave it out."
            )
        counts = [labels.sum(axis=0) for labels in (dataset.train.labels, dataset.validation.labels)]
        empty, unscored = (int((count == 0).sum()) for count in counts)
        notices, of = [*filter(None, [reasons.get("data.classes")])], f"of {len(dataset.classes):,} classes have no"
        if empty:
            notices.append(f"{empty:,} {of} image to train on")
        if unscored == len(dataset.classes) and len(dataset.validation):
            notices.append(self.leave_out_collected("no held-out image has a label"))
        elif unscored and not empty and len(dataset.validation):
            notices.append(f"{unscored:,} {of} held-out image; map and macro_f1 skip them")
        if notices:
            reasons["data.classes"] = "; ".join(notices)
        return {
            "classes": len(dataset.classes),
            **({"classes_without_images": empty} if empty else {}),
            "label_thresholds": list(self.thresholds),
        }

    def score(self, model: Model, batch: Batch) -> dict[str, Any]:
        """Return each image's binary cross-entropy, a mean over classes, and the inputs of the metrics."""
        logits = model(batch.inputs).float()
        losses = F.binary_cross_entropy_with_logits(logits, batch.targets.float(), reduction="none")
        return {"loss": losses.mean(dim=1), "logit": logits, "label": batch.targets.long()}

    def collectors(self) -> tuple[Collector, ...]:
        """Return the collector of mean average precision and F1, in percent."""
        scores = LabelScores(self.dataset.classes, self.thresholds)
        return (scores,) if any(each.is_collected for each in self.metrics) else ()

    def predict(self, model: Model, batch: Batch) -> dict[str, Tensor]:
        """Return for each class its probability, float64, and whether it is predicted and labelled, 0 or 1 [N]."""
        probabilities, names = label_probabilities(model(batch.inputs)), self.dataset.classes
        predicted = (probabilities > torch.tensor(self.thresholds, dtype=torch.float64)).int()
        columns = {"probability": probabilities, "predicted": predicted, "target": batch.targets.int()}
        return {f"{kind}_{name}": each[:, index] for kind, each in columns.items() for index, name in enumerate(names)}


class AsymmetricLoss:
    """The asymmetric loss (Ridnik et al. 2021): the mean over classes of t * L+ + (1 - t) * L-.

    L+ = (1 - p) ** gamma_positive * -log p, and L- = q ** gamma_negative * -log(1 - q) with q = max(p - clip, 0), which
    leaves out easy negatives; p is the sigmoid. With all three parameters 0 it is the binary cross-entropy.

    Args:
        gamma_negative: How strongly improbable negatives are down-weighted.
        gamma_positive: How strongly probable positives are down-weighted.
        clip: Probability up to which a negative is ignored.
    """

    def __init__(self, gamma_negative: float = 4.0, gamma_positive: float = 1.0, clip: float = 0.05) -> None:
        for name, value, end in (
            *(("gamma_negative", gamma_negative, math.inf), ("gamma_positive", gamma_positive, math.inf)),
            ("clip", clip, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < end:
                raise ValueError(f"found {name}={value}, but it must be a number from 0 to below {end}")
        self._negative, self._positive, self._clip = gamma_negative, gamma_positive, clip

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each sample, [N], in nats, from logits and targets [N, classes]."""
        tiny = torch.finfo(logits.dtype).tiny  # a power below 1 has no finite derivative at 0
        positive = (-logits).sigmoid().clamp(min=tiny) ** self._positive * F.logsigmoid(logits)
        excess = (logits.sigmoid() - self._clip).clamp(min=tiny)
        log_negative = (
            F.logsigmoid(-logits) if self._clip == 0 else ((-logits).sigmoid() + self._clip).clamp(max=1).log()
        )
        return -(targets * positive + (1 - targets) * excess**self._negative * log_negative).mean(dim=1)
