"""Text classification: one class per text, such as its topic or its mood."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from paceline.checkpoint.weights import SavedWeights
from paceline.data.balance import SampleLengths
from paceline.data.batch import Batch
from paceline.data.class_sampling import SampleClasses
from paceline.data.pipeline import Pipeline, Placement, SimplePipeline
from paceline.data.slices import SampleSlice
from paceline.host.world import World
from paceline.metrics.accumulator import Metric
from paceline.metrics.answers import Answers
from paceline.metrics.named import absent_classes
from paceline.parsing.plain_text import one_form
from paceline.plan import DataFacts
from paceline.plugins.dataset_registry import DatasetNames
from paceline.recipe.model import ModelSection
from paceline.recipe.unused import all_but
from paceline.tasks.class_losses import ClassificationLoss, rank_of_target
from paceline.tasks.task import Model, Task
from paceline_text.corpus import StoredCorpus, without_text
from paceline_text.models import build_text_classifier
from paceline_text.pipeline import padded, padding
from paceline_text.sets.labelled import LabelledTexts, open_labelled
from paceline_text.tokenizer import TokenIds, refuse_other_tokenizer, text_digest
from paceline_text.transformers_models import PREFIX

if TYPE_CHECKING:
    from paceline.prediction.predictor import Predictor
    from paceline.tasks.exportable import Exportable

_OF_TEXT = ("data.text.context", "data.text.tokenizer", "data.text.rows", "data.text.pad_multiple")
_USED = ("data.dataset", "data.path", "data.validation_fraction", "data.sampling", *_OF_TEXT)
_OF_TABLES = ("data.label_column", "data.split_column", "data.text.column")


class TextClassification(Task):
    """Assigns one of several classes to a text, which is cut to `data.text.context` tokens."""

    unit = "texts"
    headline = "top1_accuracy"
    per_word = False
    gives_scores = True
    metrics: tuple[Metric, ...] = (
        Metric(name="loss"),
        Metric(name="top1_accuracy", scale=100.0, higher_is_better=True),
    )

    @cached_property
    def dataset(self) -> LabelledTexts:
        """The texts, their classes and the tokenizer, opened on first use."""
        return open_labelled(self.recipe.data, per_word=self.per_word)

    @cached_property
    def _loss(self) -> ClassificationLoss:
        return ClassificationLoss(self.recipe.train, self.weights_by_class("train.class_weights"))

    def data_facts(self, world: World) -> DataFacts:
        """Open the texts."""
        dataset, data = self.dataset, self.recipe.data
        reason = "this task reads one text per sample"
        used = _USED + (_OF_TABLES if data.dataset in DatasetNames("label_column") else ())
        unused = all_but(used, reason) | dict.fromkeys(("model.channels_last", "evaluate.top_k"), reason)
        if data.text.rows != "single":
            unused["data.text.rows"] = reason
        return DataFacts(
            train_samples=len(dataset.train.lengths),
            evaluation_samples=len(dataset.validation.lengths),
            description={
                "dataset": dataset.name,
                "digest": dataset.digest,
                "classes": len(dataset.classes),
                "vocabulary": dataset.tokenizer.vocabulary,
                "context": data.text.context,
                "tokens": int(dataset.train.lengths.sum()),
            },
            reasons={} if dataset.reason is None else {"data.validation_fraction": dataset.reason},
            unused=unused,
            left_out=(
                *dataset.left_out,
                *absent_classes(self.recipe.evaluate.metrics, dataset.labels[1], dataset.classes),
            ),
        )

    def sample_classes(self) -> SampleClasses | None:
        """Return the labels of the training texts."""
        return self.dataset.labels[0]

    def sample_lengths(self) -> SampleLengths:
        """Return the tokens of each training text."""
        return self._lengths(self.dataset.train)

    def evaluation_lengths(self) -> SampleLengths:
        """Return the tokens of each held-out text."""
        return self._lengths(self.dataset.validation)

    def description(self) -> dict[str, Any]:
        """Return class names, the tokenizer and other facts that prediction needs."""
        tokenizer = self.dataset.tokenizer
        return {
            "class_names": list(self.dataset.classes),
            "tokenizer": tokenizer.to_tree(),
            "vocabulary": tokenizer.vocabulary,
            "context": self.recipe.data.text.context,
            **({"labels_words": True} if self.per_word else {}),
        }

    def open_pipeline(self, placement: Placement) -> Pipeline:
        """Open batches of texts, read in this process from memory."""
        return _Texts(self, placement)

    def read(self, part: SampleSlice, training: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return tokens and mask of some texts, int64 [N, T], and their targets: classes, int64 [N]."""
        dataset = self.dataset
        corpus, labels = (dataset.train, dataset.labels[0]) if training else (dataset.validation, dataset.labels[1])
        texts = [corpus.read(text, 0, int(corpus.lengths[text])) for text in part.ids.tolist()]
        width = int(self._lengths(corpus).padded(part.ids).max())
        return padded(texts, width, dataset.tokenizer), self.targets(corpus, labels, part.ids, width)

    def targets(self, corpus: StoredCorpus, labels: TokenIds, ids: TokenIds, width: int) -> torch.Tensor:
        """Return what is learned of some texts, padded to a width."""
        return torch.from_numpy(labels[ids])

    def build_model(self) -> nn.Module:
        """Build the recipe's network for the tokenizer and the classes."""
        tokenizer = self.dataset.tokenizer
        return build_text_classifier(
            self.recipe.model,
            vocabulary=tokenizer.vocabulary,
            context=self.recipe.data.text.context,
            classes=len(self.dataset.classes),
            pad=padding(tokenizer),
            per_token=self.per_word,
        )

    def prepare_training(self, placement: Placement) -> None:
        """Build the recipe's loss and test it.

        Raises:
            RecipeError: If it cannot be imported or built, or does not return one loss per sample.
        """
        self._loss.check(len(self.dataset.classes), placement.device)

    def check_published(self, model: ModelSection) -> bool:
        """Return whether this is a network of Transformers, whose weights only training loads."""
        return model.name.startswith(PREFIX)

    def loss(self, model: Model, batch: Batch) -> torch.Tensor:
        """Return the recipe's loss, the mean over the micro-batch's texts."""
        return self._loss(_logits(model, batch), batch.targets, batch.slice.mean_class_weight)

    def score(self, model: Model, batch: Batch) -> dict[str, torch.Tensor]:
        """Return the cross-entropy without smoothing, and whether the label has the highest score."""
        logits = _logits(model, batch).float()
        values = {
            "loss": F.cross_entropy(logits, batch.targets, reduction="none"),
            "top1_accuracy": rank_of_target(logits, batch.targets) < 1,
        }
        return values | ({"logit": logits, "label": batch.targets} if self.recipe.evaluate.metrics else {})

    def predict(self, model: Model, batch: Batch) -> dict[str, torch.Tensor]:
        """Return the most probable class and its probability."""
        probability, label = _logits(model, batch).float().softmax(dim=1).max(dim=1)
        return {"prediction": label, "probability": probability, "target": batch.targets}

    def answers(self, model: Model, batch: Batch) -> Answers | None:
        """Return the class with the highest score."""
        return Answers.of(_logits(model, batch), batch.targets)

    def adapt_to(self, saved: SavedWeights) -> None:
        """Number the classes as the weights do, if all of the data's are known to them."""
        names, dataset = tuple(saved.description("data").get("class_names") or ()), self.dataset
        if names and dataset.classes != names and set(one_form(dataset.classes, names).values()) <= set(names):
            self.dataset = dataset.with_classes(names)

    def check_trained(self, saved: SavedWeights) -> None:
        """Refuse text that was encoded otherwise than in training."""
        refuse_other_tokenizer(
            self.dataset.tokenizer, saved.description("data"), str(saved.path), name=self.recipe.data.text.tokenizer
        )

    def split_sizes(self) -> tuple[int, int] | None:
        """Return the texts of training and of validation, if each has one class."""
        return None if self.per_word else (len(self.dataset.labels[0]), len(self.dataset.labels[1]))

    def score_only(self, ids: TokenIds, *, training: bool) -> None:
        """Score some training or validation texts."""
        dataset = self.dataset
        corpus, labels = (dataset.train if training else dataset.validation), dataset.labels[not training]
        self.dataset = replace(dataset, validation=corpus.part(ids), labels=(dataset.labels[0], labels[ids]))

    def train_only(self, ids: TokenIds) -> None:
        """Train on some of the training texts."""
        dataset = self.dataset
        train, labels = dataset.train.part(ids), (dataset.labels[0][ids], dataset.labels[1])
        digest = text_digest(dataset.digest.encode(), b"train only", ids.tobytes())
        self.dataset = replace(dataset, train=train, labels=labels, digest=digest)

    def recall(self, saved: SavedWeights) -> None:
        """Take the tokenizer and the classes from the description; no text is read."""
        described, none = saved.description("data"), np.empty(0, dtype=np.int64)
        self.dataset = LabelledTexts(
            **without_text(described, str(saved.path)), labels=(none, none), classes=tuple(described["class_names"])
        )

    def predictor(self, saved: SavedWeights, device: torch.device) -> Predictor:
        """Return what classifies texts."""
        # Imported only where used: training needs none of it.
        from paceline_text.answers import TextLabeller

        return TextLabeller(saved, self.trained(saved, device), self.dataset.tokenizer, device, self.recipe.data.text)

    def exportable(self, saved: SavedWeights, target: str) -> Exportable:
        """Return the network with its inputs: tokens, and which of them are padding."""
        from paceline_text.answers import MASK, exportable_text

        return exportable_text(saved, self.trained(saved), MASK)

    def _lengths(self, corpus: StoredCorpus) -> SampleLengths:
        text = self.recipe.data.text
        return SampleLengths(tokens=corpus.lengths, multiple=text.pad_multiple, max_width=text.context)


class _Texts(SimplePipeline):
    """Batches of texts; a sample's name is its row's."""

    def __init__(self, task: TextClassification, placement: Placement) -> None:
        self._found = task.dataset
        super().__init__(task.read, evaluation_samples=len(self._found.validation.lengths), placement=placement)

    def sample_name(self, sample_id: int, *, training: bool) -> str:
        """Return the name of the text's row."""
        return (self._found.train if training else self._found.validation).name(sample_id)


def _logits(model: Model, batch: Batch) -> torch.Tensor:
    logits: torch.Tensor = model(batch.inputs["tokens"], batch.inputs["mask"])
    return logits
