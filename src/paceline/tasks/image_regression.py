"""Image regression: predict one or more numbers per image, such as an age or a position."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from paceline.checkpoint.weights import SavedWeights
from paceline.data.batch import Batch
from paceline.data.image.datasets import ImageDataset
from paceline.data.image.selection import relabelled
from paceline.errors import DataError, RecipeError
from paceline.metrics.accumulator import Collector, Metric
from paceline.metrics.regression import NumberErrors, error_metrics
from paceline.parsing.units import first_of
from paceline.tasks.image_classification import ImageTask
from paceline.tasks.labelling import in_units
from paceline.tasks.task import Model

_LOSSES: dict[str, Callable[..., Tensor]] = {"mse": F.mse_loss, "l1": F.l1_loss, "huber": F.huber_loss}
_NO_CLASSES = "image_regression learns numbers, not classes"


class ImageRegression(ImageTask):
    """Predicts one or more numbers per image.

    Targets are standardised by the mean and standard deviation of the training set. Both are saved with the weights, so
    that predictions are in the user's units.
    """

    headline = "mae"
    learns = "numbers"
    unused = MappingProxyType(
        dict.fromkeys(
            ("train.label_smoothing", "train.target_threshold", "train.loss_options", "evaluate.top_k"), _NO_CLASSES
        )
        | {"data.label_column": "data.target_columns says which columns hold the targets"}
    )

    @cached_property
    def dataset(self) -> ImageDataset:
        """The images with standardised targets, float32 [N, columns].

        Raises:
            DataError: If the data have no numbers, or a column is constant.
            RecipeError: If the recipe's standardisation has another number of columns.
        """
        dataset, data = super().dataset, self.recipe.data
        targets = dataset.train.labels
        if not np.issubdtype(targets.dtype, np.floating):
            raise RecipeError(
                f"task=image_regression learns numbers, and data.dataset={data.dataset} was opened with classes: name "
                "the columns of numbers of a csv or parquet table in data.target_columns."
            )
        means, stds = zip(*(_mean_and_std(column) for column in targets.T), strict=True)
        mean = means if data.target_mean == "auto" else data.target_mean
        std = stds if data.target_std == "auto" else data.target_std
        for key, numbers in (("target_mean", mean), ("target_std", std)):
            if len(numbers) != len(dataset.classes):
                raise RecipeError(
                    f"data.{key} has {len(numbers)} numbers, but {len(dataset.classes)} columns are learned "
                    f"({', '.join(dataset.classes)}): give one for each, or 'auto'."
                )
        if 0 in std:
            raise DataError(
                f"the column {dataset.classes[std.index(0)]!r} has the same number in all training images, so there is "
                "nothing to learn from it: leave it out of data.target_columns."
            )
        dataset = relabelled(dataset, lambda targets: ((targets - mean) / std).astype(np.float32))
        return replace(dataset, target_mean=mean, target_std=std)

    def adapt_to(self, saved: SavedWeights) -> None:
        """Check that the columns are those in training."""
        known, columns = saved.description("data").get("targets"), self.recipe.data.target_columns
        if known is not None and columns not in ((), tuple(known)):
            raise DataError(
                f"the weights in {saved.path} learned {first_of(known)}, and data.target_columns names "
                f"{first_of(columns)}; name the columns as in training."
            )

    def target_facts(self, reasons: dict[str, str]) -> dict[str, Any]:
        """Return the column names and their standardisation."""
        dataset, mix = self.dataset, self.recipe.data.mix
        if mix.cutmix > 0:
            raise RecipeError(
                f"data.mix.cutmix={mix.cutmix:g} puts a part of one image into another, which has no matching target: "
                "use data.mix.mixup, which mixes the numbers too, or leave it out."
            )
        reasons |= dict.fromkeys(("data.target_mean", "data.target_std"), "over the training images")
        self.metrics = (Metric(name="loss"), *error_metrics(dataset.classes))
        return {
            "targets": list(dataset.classes),
            "target_mean": list(dataset.target_mean),
            "target_std": list(dataset.target_std),
        }

    def loss(self, model: Model, batch: Batch) -> Tensor:
        """Return the recipe's loss on standardised targets, a mean over images and columns."""
        return _LOSSES[self.recipe.train.loss](*_standardized(model, batch))

    def score(self, model: Model, batch: Batch) -> dict[str, Any]:
        """Return the loss of each image and the inputs of the metrics."""
        predictions, targets = _standardized(model, batch)
        losses = _LOSSES[self.recipe.train.loss](predictions, targets, reduction="none")
        return {"loss": losses.mean(dim=1), "error": predictions - targets, "target": targets}

    def shown(self, batch: Batch) -> list[tuple[Tensor, str]]:
        """Return the images, each with its numbers in the user's units."""
        dataset = self.dataset
        numbers = in_units(batch.targets, dataset.target_mean, dataset.target_std).tolist()
        captions = (
            ", ".join(f"{name} {value:.4g}" for name, value in zip(dataset.classes, row, strict=True))
            for row in numbers
        )
        return list(zip(self.pictures(batch.inputs), captions, strict=True))

    def collectors(self) -> tuple[Collector, ...]:
        """Return the collector of mean absolute error, root mean squared error and R², in the user's units."""
        dataset = self.dataset
        return (NumberErrors(dataset.classes, dataset.target_std, dataset.target_mean),)

    def predict(self, model: Model, batch: Batch) -> dict[str, Tensor]:
        """Return each number as predicted and as labelled, in the user's units, float64 [N]."""
        dataset = self.dataset
        both = (in_units(each, dataset.target_mean, dataset.target_std) for each in _standardized(model, batch))
        columns = dict(zip(("predicted", "target"), both, strict=True)).items()
        return {f"{kind}_{name}": each[:, at] for kind, each in columns for at, name in enumerate(dataset.classes)}


def _standardized(model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the network's output and the targets, both [N, columns], in at least single precision."""
    predictions: Tensor = model(batch.inputs)
    predictions = predictions if predictions.dtype == torch.float64 else predictions.float()
    predictions = predictions.reshape(batch.targets.shape)
    return predictions, batch.targets.to(predictions.dtype)


def _mean_and_std(column: NDArray[np.float64]) -> tuple[float, float]:
    """Return mean and standard deviation, bit-identical on every machine."""
    if len(column) and column.min() == column.max():
        return float(column[0]), 0.0
    mean = math.fsum(column) / len(column)
    return mean, math.sqrt(math.fsum((column - mean) ** 2) / len(column))
