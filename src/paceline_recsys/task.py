"""Recommendation: click prediction with binary cross-entropy and the area under the ROC curve.

This package holds all that is particular to it: samples (``dataset.py``, ``pipeline.py`` and, by name, ``sets``),
networks (``networks.py``), and what predicts the clicks of lines with trained weights (``predictor.py``).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from paceline.checkpoint.weights import SavedWeights
from paceline.data.batch import Batch
from paceline.data.pipeline import Pipeline, Placement
from paceline.host.world import World
from paceline.metrics.accumulator import Collector, Metric
from paceline.metrics.multilabel import RankedScores, area_under_curve
from paceline.plan import DataFacts
from paceline.recipe.unused import all_but
from paceline.tasks.task import Model, Task
from paceline_recsys.dataset import ClickDataset, ClickSource
from paceline_recsys.networks import build_click_model, describe_tables
from paceline_recsys.pipeline import ClickPipeline
from paceline_recsys.sets.synthetic import SyntheticClicks, open_clicks

if TYPE_CHECKING:
    from paceline.prediction.predictor import Predictor
    from paceline.tasks.exportable import Exportable

_GENERATOR = ("dense_features", "categories", "zipf", "rank", "evaluation_samples")
_NO_IMAGES = "recommendation uses no images"
_ONE_QUESTION = "recommendation is a binary task"
_BLOCK = 1024


class Recommendation(Task):
    """Predicts the click probability of each sample.

    The network takes ``(dense, categories)``, float32 [N, dense features] and int64 [N, categorical features], and
    returns logits, [N].
    """

    headline = "auc"
    gives_scores = True
    metrics = (
        Metric(name="loss"),
        Metric(name="auc", higher_is_better=True, is_collected=True),
        Metric(name="accuracy", scale=100.0, higher_is_better=True),
        Metric(name="normalized_entropy", is_collected=True),
    )

    @cached_property
    def dataset(self) -> ClickDataset:
        """The samples, opened on first use."""
        return open_clicks(self.recipe.data)

    def data_facts(self, world: World) -> DataFacts:
        """Open the data; for synthetic data, report the best possible score."""
        dataset = self.dataset
        undefined = "auc and normalized_entropy are undefined: all held-out samples have the same label"
        is_undefined = len(dataset.validation) > 0 and _has_one_label(dataset.validation)
        return DataFacts(
            train_samples=len(dataset.train),
            evaluation_samples=len(dataset.validation),
            description={
                "dataset": dataset.name,
                "digest": dataset.digest,
                "dense_features": dataset.dense_features,
                "categories": len(dataset.tables),
                "tables": describe_tables(self.recipe, dataset.tables),
                **dataset.facts,
                **self._ceiling(),
            },
            reasons=dict(dataset.reasons),
            unused=self._unused(),
            left_out=(*dataset.left_out, *([undefined] if is_undefined else [])),
        )

    def description(self) -> dict[str, Any]:
        """Return what prediction needs: how categories map to table rows."""
        return {"table_rows": list(self.dataset.tables)}

    def open_pipeline(self, placement: Placement) -> Pipeline:
        """Open batches of numeric features and categories."""
        return ClickPipeline(train=self.dataset.train, evaluation=self.dataset.validation, placement=placement)

    def build_model(self) -> nn.Module:
        """Build the recipe's network, with one table per categorical feature."""
        return build_click_model(
            self.recipe.model, dense_features=self.dataset.dense_features, table_rows=self.dataset.tables
        )

    def loss(self, model: Model, batch: Batch) -> torch.Tensor:
        """Return the mean binary cross-entropy, in nats."""
        return F.binary_cross_entropy_with_logits(_logits(model, batch), batch.targets)

    def score(self, model: Model, batch: Batch) -> dict[str, Any]:
        """Return the loss, whether the more probable class is right, and the logit for the area under the curve."""
        logits = _logits(model, batch)
        return {
            "loss": F.binary_cross_entropy_with_logits(logits, batch.targets, reduction="none"),
            "accuracy": ((logits > 0) == (batch.targets > 0.5)) & ~logits.isnan(),
            "logit": logits,
            "label": batch.targets.long(),
        }

    def collectors(self) -> tuple[Collector, ...]:
        """Return the collector of scores for the area under the curve."""
        return (RankedScores(),)

    def predict(self, model: Model, batch: Batch) -> dict[str, torch.Tensor]:
        """Return the click probability."""
        return {"probability": _logits(model, batch).sigmoid(), "target": batch.targets}

    def adapt_to(self, saved: SavedWeights) -> None:
        """Use tables as large as the weights', whatever data is scored: categories are hashed into them."""
        rows, clicks = saved.description("data").get("table_rows"), self.recipe.data.recommendation
        if self.recipe.data.dataset == "criteo" and rows is not None and clicks.tables == "auto":
            clicks = replace(clicks, tables=tuple(rows))
            self.recipe = replace(self.recipe, data=replace(self.recipe.data, recommendation=clicks))

    def recall(self, saved: SavedWeights) -> None:
        """Take the sizes of features and tables from the description; no sample is read."""
        described = saved.description("data")
        nothing: Any = ()  # no sample is requested
        self.dataset = ClickDataset(
            name=described["dataset"],
            train=nothing,
            validation=nothing,
            dense_features=described["dense_features"],
            tables=tuple(described["table_rows"]),
            digest=described["digest"],
        )

    def predictor(self, saved: SavedWeights, device: torch.device) -> Predictor:
        """Return what predicts the clicks of lines."""
        # Imported only where used: training needs none of it.
        from paceline_recsys.predictor import ClickPredictor

        return ClickPredictor(saved, self.trained(saved, device), device)

    def exportable(self, saved: SavedWeights, target: str) -> Exportable:
        """Return the network with its inputs: numbers, and rows of the tables."""
        from paceline.tasks.exportable import Exportable, Input

        network, rows, numbers = self.trained(saved), self.dataset.tables, self.dataset.dense_features
        inputs = (
            Input("dense", ("batch", numbers), None, "numbers as the network was trained on them, float32"),
            Input("categories", ("batch", len(rows)), rows, "a row of each table, int64"),
        )
        return Exportable(network=network, inputs=inputs, longest={}, saved=saved)

    def _ceiling(self) -> dict[str, float]:
        """Return the area under the curve of the true probabilities of synthetic data; empty for real data."""
        source = self.dataset.validation
        if not isinstance(source, SyntheticClicks):
            return {}
        ids = np.arange(len(source))
        return {"best_possible_auc": area_under_curve(source.probabilities(ids), source.read(ids).labels.astype(bool))}

    def _unused(self) -> dict[str, str]:
        """Return keys that have no effect on this task or data set."""
        name = self.dataset.name
        is_generated, is_criteo = name == "synthetic_clicks", name == "criteo"
        used = {"data.dataset", "data.recommendation"}
        used |= {"data.samples"} if is_generated else {"data.path", "data.validation_fraction"}
        used |= {"data.on_bad", "data.max_broken"} if is_criteo else set()
        keys = ("loss", "loss_options", "target_threshold", "label_smoothing")
        unused = all_but(used, _NO_IMAGES) | {"model.channels_last": _NO_IMAGES}
        unused |= {f"train.{key}": _ONE_QUESTION for key in keys} | {"evaluate.top_k": _ONE_QUESTION}
        if is_criteo:
            unused |= {f"data.recommendation.{key}": "it sets data.dataset=synthetic_clicks" for key in _GENERATOR}
        else:
            unused["data.recommendation.cache"] = "only data.dataset=criteo is stored"
        if is_generated:
            unused["data.path"] = "generated samples are not in a file"
        if self.recipe.data.recommendation.tables != "auto":
            unused["data.recommendation.max_rows"] = "data.recommendation.tables says how many rows each table has"
        return unused


def _logits(model: Model, batch: Batch) -> torch.Tensor:
    logits: torch.Tensor = model(batch.inputs["dense"], batch.inputs["categories"])
    return logits.float()


def _has_one_label(source: ClickSource) -> bool:
    """Whether all samples have the same label; reads up to the first other one."""
    first = source.read(np.arange(1)).labels[0]
    blocks = range(0, len(source), _BLOCK)
    return all((source.read(np.arange(at, min(at + _BLOCK, len(source)))).labels == first).all() for at in blocks)
